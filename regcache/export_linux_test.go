package regcache

import "testing"

// NewNIC is newNIC for tests outside of the package.
func NewNIC(t testing.TB) *fakeNIC { return newNIC(t) }

// WithoutValidators returns a configuration with which every cached region counts as valid.
func WithoutValidators() Config { return Config{trustEverything: true} }
