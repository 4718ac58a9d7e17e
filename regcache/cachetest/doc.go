// Package cachetest holds a registration cache against a device, while memory
// is treated as programs and the Go runtime treat it. It is for tests: of
// regcache with a simulated card, of providers with real ones.
package cachetest
