//go:build !linux

package moving

// Registry has the providers of this build, in order of preference: none.
var Registry []Provider
