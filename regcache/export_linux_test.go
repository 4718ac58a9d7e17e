package regcache

import "testing"

// NewNIC is newNIC for the tests that are outside of the package.
func NewNIC(t testing.TB) *fakeNIC { return newNIC(t) }

// WithoutValidators returns a configuration that believes every cached region.
func WithoutValidators() Config { return Config{trustEverything: true} }
