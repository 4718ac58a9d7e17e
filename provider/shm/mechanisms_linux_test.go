package shm

import "testing"

// The other tests could not run without the required mechanisms, so they must be found.
func TestMechanismsThatAreRequiredWorkWhereTheProviderDoes(t *testing.T) {
	names := map[string]bool{}
	for _, m := range Mechanisms() {
		names[m.Name] = true
		if m.Required && m.Err != nil {
			t.Errorf("%s: %v", m.Name, m.Err)
		}
		if m.Use == "" {
			t.Errorf("%s: nobody learns what it is for", m.Name)
		}
	}
	for _, want := range []string{"sock_diag", "memfd", "pidfd", "process_vm_readv"} {
		if !names[want] {
			t.Errorf("%s is not among them", want)
		}
	}
}

func TestScopeOfPtraceDecidesWhoMayBeRead(t *testing.T) {
	for _, c := range []struct {
		scope          string
		plain, capable bool // may read other processes of the same user
	}{
		{"0", true, true},
		{"1", false, true},
		{"2", false, true},
		{"3", false, false},
	} {
		if err := scopeError(c.scope, false); (err == nil) != c.plain {
			t.Errorf("scope %s: %v", c.scope, err)
		}
		if err := scopeError(c.scope, true); (err == nil) != c.capable {
			t.Errorf("scope %s with CAP_SYS_PTRACE: %v", c.scope, err)
		}
	}
}
