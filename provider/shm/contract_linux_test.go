package shm

import (
	"testing"

	"github.com/sanconn/san/internal/endpointtest"
	"github.com/sanconn/san/session"
)

// TestContract runs the contract of session.Endpoint on both ends of a link in one process. The link
// goes through the same steps as one between two processes.
func TestContract(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  Config
	}{
		{"largest ring", Config{}},
		{"smallest ring", Config{ringMax: minRingMax}},
		{"doorbells by socket", Config{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			leaks(t)
			if tc.name == "doorbells by socket" {
				bySocket(t)
			}
			endpointtest.Run(t, func() (a, b session.Endpoint, stop func(), err error) {
				a, b, err = connected(tc.cfg)
				return a, b, func() {}, err
			})
		})
	}
}
