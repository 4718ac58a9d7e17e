// Package environment reads what operators set for the whole process.
package environment

import (
	"fmt"
	"log"
	"maps"
	"math"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/sanconn/san/internal/trace"
	"github.com/sanconn/san/regcache"
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
	envTrafficClass = "SAN_TRAFFIC_CLASS"
	envServiceLevel = "SAN_SERVICE_LEVEL"
	envAckTimeout   = "SAN_ACK_TIMEOUT"
	envArena        = "SAN_ARENA"
	envMove         = "SAN_MOVE"
	envShmDir       = "SAN_SHM_DIR"
	envTrace        = "SAN_TRACE"
)

// Values are what operators have set.
type Values struct {
	Restricted bool     // SAN_PROVIDERS is set
	Providers  []string // then: those that may be used, in order
	Disable    session.Feature
	MoveAtOnce bool   // SAN_MOVE=now
	ShmDir     string // SAN_SHM_DIR
	Trace      *trace.Log
	tracePath  string // SAN_TRACE

	// Of verbs:
	Subnets      []netip.Prefix // that it may serve; nil: all
	SharedDomain bool
	IWARPOffset  int // 0: the default, as for all numbers
	WithoutCM    bool
	TrafficClass uint8
	ServiceLevel uint8
	AckTimeout   uint8
	arena        int // MiB of regcache.DefaultArena

	Err error // about the first value that is not understood
}

// Allows reports whether a provider may be used.
func (e *Values) Allows(provider string) bool {
	return !e.Restricted || slices.Contains(e.Providers, provider)
}

// Read reads the environment, which may name these providers, and does what it says for all
// connections: it sets regcache.DefaultArena's limit, and opens the trace.
func Read(providers []string) *Values {
	e := parse(os.LookupEnv, providers)
	if e.arena > 0 {
		regcache.SetArenaLimit(int64(e.arena) << 20)
	}
	if e.tracePath != "" {
		var err error
		if e.Trace, err = trace.Open(e.tracePath); err != nil {
			log.Printf("san: no trace, as %s says: %v", envTrace, err)
		}
	}
	return &e
}

func parse(lookup func(string) (string, bool), providers []string) Values {
	v := variables{lookup: lookup}
	return Values{
		Restricted:   v.text(envProviders) != "",
		Providers:    v.providers(providers),
		Disable:      v.features(),
		MoveAtOnce:   v.word(envMove, "now") == "now",
		ShmDir:       v.text(envShmDir),
		tracePath:    v.text(envTrace),
		Subnets:      v.subnets(),
		SharedDomain: v.word(envSharedDomain, "on", "off") == "on",
		IWARPOffset:  v.offset(),
		WithoutCM:    v.word(envRDMACM, "on", "off") == "off",
		TrafficClass: uint8(v.number(envTrafficClass, 0, math.MaxUint8)),
		ServiceLevel: uint8(v.number(envServiceLevel, 0, 15)),
		AckTimeout:   uint8(v.number(envAckTimeout, 0, 31)),
		arena:        v.number(envArena, 1, 1<<20),
		Err:          v.err,
	}
}

// variables reads them, and keeps the error about the first that is not understood.
type variables struct {
	lookup func(string) (string, bool)
	err    error
}

func (v *variables) bad(format string, args ...any) {
	if v.err == nil {
		v.err = fmt.Errorf("san: "+format, args...)
	}
}

func (v *variables) text(name string) string {
	s, _ := v.lookup(name)
	return strings.TrimSpace(s)
}

func (v *variables) providers(known []string) (names []string) {
	for _, word := range words(v.text(envProviders)) {
		switch {
		case word == "none":
		case slices.Contains(known, word):
			names = append(names, word)
		default:
			v.bad("unknown provider %q in %s; known are %s and none",
				word, envProviders, strings.Join(known, ", "))
		}
	}
	return names
}

func (v *variables) features() (all session.Feature) {
	for _, word := range words(v.text(envDisable)) {
		f, ok := session.FeatureNames[word]
		if !ok {
			v.bad("unknown mechanism %q in %s; known are %s",
				word, envDisable, strings.Join(slices.Sorted(maps.Keys(session.FeatureNames)), ", "))
		}
		all |= f
	}
	return all
}

func (v *variables) subnets() (list []netip.Prefix) {
	for _, word := range words(v.text(envSubnets)) {
		p, err := netip.ParsePrefix(word)
		if err != nil {
			v.bad("%q in %s is not a subnet such as 10.8.0.0/16 or fd08::/64", word, envSubnets)
		}
		list = append(list, p)
	}
	return list
}

// word is one of these, "" if the variable is not set.
func (v *variables) word(name string, known ...string) string {
	s := v.text(name)
	word := strings.ToLower(s)
	if word != "" && !slices.Contains(known, word) {
		v.bad("%s=%s is not %s", name, s, strings.Join(known, " or "))
	}
	return word
}

// offset is not 0, which would mean the default.
func (v *variables) offset() int {
	n := v.number(envIWARPOffset, -math.MaxUint16, math.MaxUint16)
	if n == 0 && v.text(envIWARPOffset) != "" {
		v.bad("%s=0: no iWARP is -1", envIWARPOffset)
	}
	return n
}

// number is one that is 0, which means the default, if the variable is not set.
func (v *variables) number(name string, least, most int) int {
	s := v.text(name)
	if s == "" {
		return 0
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < least || n > most {
		v.bad("%s=%s is not a number from %d to %d", name, s, least, most)
	}
	return n
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
