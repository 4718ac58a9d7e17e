//go:build !linux

package san

// registry has the providers of this build, in order of preference: none.
var registry []provider
