package san

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/sanconn/san/session"
)

// Names of the operators' switches.
const (
	envProviders = "SAN_PROVIDERS"
	envDisable   = "SAN_DISABLE"
)

// environment is what operators have set.
type environment struct {
	restricted bool     // SAN_PROVIDERS is set
	providers  []string // then: those that may be used, in order
	disable    session.Feature
	err        error // a word that is not known
}

func (e environment) allows(provider string) bool {
	return !e.restricted || slices.Contains(e.providers, provider)
}

// processEnvironment is read once, as the answer must not change between two
// connections.
var processEnvironment = sync.OnceValue(func() environment { return parseEnvironment(os.LookupEnv) })

func parseEnvironment(lookup func(string) (string, bool)) (e environment) {
	if s, ok := lookup(envProviders); ok && strings.TrimSpace(s) != "" {
		e.restricted = true
		for _, word := range words(s) {
			switch {
			case word == "none":
			case isProvider(word, registry):
				e.providers = append(e.providers, word)
			default:
				e.err = fmt.Errorf("san: unknown provider %q in %s; known are %s and none",
					word, envProviders, strings.Join(providerNames(registry), ", "))
				return e
			}
		}
	}
	s, _ := lookup(envDisable)
	for _, word := range words(s) {
		f, ok := session.FeatureNames[word]
		if !ok {
			e.err = fmt.Errorf("san: unknown word %q in %s; known are %s",
				word, envDisable, strings.Join(slices.Sorted(maps.Keys(session.FeatureNames)), ", "))
			return e
		}
		e.disable |= f
	}
	return e
}

// words splits a comma separated list and leaves out what is empty.
func words(list string) (words []string) {
	for w := range strings.SplitSeq(list, ",") {
		if w = strings.ToLower(strings.TrimSpace(w)); w != "" {
			words = append(words, w)
		}
	}
	return words
}
