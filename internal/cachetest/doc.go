// Package cachetest compares what a registration cache returns with a device, while memory
// is treated as programs and the Go runtime treat it. It is for tests: of regcache with a
// simulated network card, of providers with real devices.
package cachetest
