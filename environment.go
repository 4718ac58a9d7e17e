package san

import (
	"fmt"
	"maps"
	"math"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/sanconn/san/session"
)

// Names of the environment variables for operators.
const (
	envProviders    = "SAN_PROVIDERS"
	envDisable      = "SAN_DISABLE"
	envSubnets      = "SAN_SUBNETS"
	envIWARPOffset  = "SAN_IWARP_OFFSET"
	envSharedDomain = "SAN_SHARED_DOMAIN"
	envRDMACM       = "SAN_RDMACM"
)

// environment is what operators have set.
type environment struct {
	restricted bool     // SAN_PROVIDERS is set
	providers  []string // then: those that may be used, in order
	disable    session.Feature

	// Of verbs:
	subnets      []netip.Prefix // that it may serve; nil: all
	sharedDomain bool
	rdma         RDMA // where the program does not set it

	err error // about the first value that is not understood
}

func (e environment) allows(provider string) bool {
	return !e.restricted || slices.Contains(e.providers, provider)
}

// processEnvironment reads the environment once, because the answer must not change
// between connections.
var processEnvironment = sync.OnceValue(func() environment { return parseEnvironment(os.LookupEnv) })

func parseEnvironment(lookup func(string) (string, bool)) (e environment) {
	bad := func(format string, args ...any) {
		if e.err == nil {
			e.err = fmt.Errorf("san: "+format, args...)
		}
	}
	list := func(name string) []string { s, _ := lookup(name); return words(s) }
	names, _ := lookup(envProviders)
	e.restricted = strings.TrimSpace(names) != ""
	for _, word := range words(names) {
		switch {
		case word == "none":
		case isProvider(word, registry):
			e.providers = append(e.providers, word)
		default:
			bad("unknown provider %q in %s; known are %s and none",
				word, envProviders, strings.Join(providerNames(registry), ", "))
		}
	}
	for _, word := range list(envDisable) {
		f, ok := session.FeatureNames[word]
		if !ok {
			bad("unknown mechanism %q in %s; known are %s",
				word, envDisable, strings.Join(slices.Sorted(maps.Keys(session.FeatureNames)), ", "))
		}
		e.disable |= f
	}
	for _, word := range list(envSubnets) {
		p, err := netip.ParsePrefix(word)
		if err != nil {
			bad("%q in %s is not a subnet such as 10.8.0.0/16 or fd08::/64", word, envSubnets)
		}
		e.subnets = append(e.subnets, p)
	}
	if s, _ := lookup(envIWARPOffset); strings.TrimSpace(s) != "" {
		n, err := strconv.Atoi(strings.TrimSpace(s))
		if err != nil || n == 0 || n > math.MaxUint16 {
			bad("%s=%s is neither a number from 1 to %d nor negative (no iWARP)", envIWARPOffset, s, math.MaxUint16)
		}
		e.rdma.IWARPOffset = n
	}
	onOff := func(name string, unset bool) bool {
		s, _ := lookup(name)
		switch strings.ToLower(strings.TrimSpace(s)) {
		case "":
			return unset
		case "on":
			return true
		case "off":
		default:
			bad("%s=%s is neither on nor off", name, s)
		}
		return false
	}
	e.sharedDomain = onOff(envSharedDomain, false)
	e.rdma.WithoutCM = !onOff(envRDMACM, true)
	return e
}

// words splits a comma-separated list and drops empty words.
func words(list string) (words []string) {
	for w := range strings.SplitSeq(list, ",") {
		if w = strings.ToLower(strings.TrimSpace(w)); w != "" {
			words = append(words, w)
		}
	}
	return words
}
