package san

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// named is a provider that only has a name.
type named struct {
	provider
	n string
}

func (p named) name() string { return p.n }

func TestChoose(t *testing.T) {
	shm, verbs := named{n: "shm"}, named{n: "verbs"}
	both := []provider{shm, verbs}
	only := func(names ...string) environment { return environment{restricted: true, providers: names} }
	for _, c := range []struct {
		name       string
		want       []string
		env        environment
		registered []provider
		chosen     []string
		why        Reason
		err        string
	}{
		{name: "all by default", registered: both, chosen: []string{"shm", "verbs"}},
		{name: "the dialer's order counts", want: []string{"verbs", "shm"}, registered: both, chosen: []string{"verbs", "shm"}},
		{name: "the operator's order counts where the program has none", env: only("verbs", "shm"), registered: both, chosen: []string{"verbs", "shm"}},
		{name: "a name that comes twice", want: []string{"verbs", "shm", "verbs"}, registered: both, chosen: []string{"verbs", "shm"}},
		{name: "the operator restricts the program", want: []string{"shm", "verbs"}, env: only("verbs"), registered: both, chosen: []string{"verbs"}},
		{name: "the operator wants none", env: only(), registered: both, why: ReasonDisabled},
		{name: "the program wants none", want: []string{}, registered: both, why: ReasonDisabled},
		{name: "the operator leaves nothing of the program's choice", want: []string{"shm"}, env: only("verbs"), registered: both, why: ReasonDisabled},
		{name: "this build has none", why: ReasonNoProvider},
		{name: "this build lacks the one", want: []string{"verbs"}, registered: []provider{shm}, why: ReasonNoProvider},
		{name: "unknown name", want: []string{"shn"}, registered: both, err: `unknown provider "shn"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, why, err := choose(c.want, c.env, c.registered)
			var names []string
			for _, p := range got {
				names = append(names, p.name())
			}
			if diff := cmp.Diff(c.chosen, names); diff != "" {
				t.Errorf("chosen (-want +got):\n%s", diff)
			}
			if r := reasonOrNone(why); r != c.why {
				t.Errorf("reason %v, want %v", r, c.why)
			}
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
		})
	}
}

func reasonOrNone(why *Unavailable) Reason {
	if why == nil {
		return ReasonNone
	}
	return why.Reason
}
