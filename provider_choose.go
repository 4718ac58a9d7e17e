package san

import (
	"fmt"
	"slices"
	"strings"
)

// choose returns the providers to try, in order, or why there are none. want is a Providers
// field. It is an error if that has an unknown name, or the environment is not understood.
func choose(policy Policy, want []string, env *environment) ([]provider, *Unavailable, error) {
	if env.err != nil {
		return nil, nil, env.err
	}
	for _, name := range want {
		if !isProvider(name) {
			return nil, nil, fmt.Errorf("san: unknown provider %q in Providers; known are %s",
				name, strings.Join(providerNames(), ", "))
		}
	}
	var chosen []provider
	refused := false
	switch {
	case want == nil && !env.restricted:
		chosen = registry
	case want == nil:
		want = env.providers
	}
	for _, name := range want {
		if !env.allows(name) {
			refused = true
			continue
		}
		for _, p := range registry {
			if p.name() == name && !slices.Contains(chosen, p) {
				chosen = append(chosen, p)
			}
		}
	}
	switch {
	case policy == Never:
		return nil, &Unavailable{Reason: ReasonPolicy}, nil
	case len(chosen) > 0:
		return chosen, nil, nil
	case refused || len(want) == 0 && (want != nil || env.restricted):
		return nil, &Unavailable{Reason: ReasonDisabled}, nil
	}
	return nil, &Unavailable{Reason: ReasonNoProvider}, nil
}

// standard are the providers of the project, in order of preference, even those that this
// build does not have.
var standard = []string{"shm", "verbs"}

// providerNames are all that Providers and SAN_PROVIDERS may name, in order of
// preference.
func providerNames() []string {
	names := slices.Clone(standard)
	for _, p := range registry {
		if !slices.Contains(names, p.name()) {
			names = append(names, p.name())
		}
	}
	return names
}

func isProvider(name string) bool { return slices.Contains(providerNames(), name) }
