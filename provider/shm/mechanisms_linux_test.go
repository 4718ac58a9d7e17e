package shm

import "testing"

// The other tests could not run without the required mechanisms, so all of these must be found.
func TestMechanismsThatAreRequiredWorkWhereTheProviderDoes(t *testing.T) {
	names := map[string]bool{}
	for _, m := range Mechanisms() {
		names[m.Name] = true
		if m.Err != nil && (m.Required || m.Name == "unix_diag") { // nor could the tests that use no directory
			t.Errorf("%s: %v", m.Name, m.Err)
		}
		if m.Use == "" {
			t.Errorf("%s: nobody learns what it is for", m.Name)
		}
	}
	for _, want := range []string{"memfd", "pidfd", "unix_diag"} {
		if !names[want] {
			t.Errorf("%s is not among them", want)
		}
	}
}
