package twin_test

import (
	"math"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/endpointtest"
	"github.com/sanconn/san/session/twin"
)

// The kinds of provider that there are, and those that there could be.
var kinds = map[string]twin.Config{
	"ring": {},
	"queue pair": {
		Limits: session.Limits{Window: 64, CanRead: true, CanWrite: true, MaxExpose: math.MaxInt},
	},
	"smallest": {
		Limits: session.Limits{Window: session.MinWindow, MaxMessage: session.MaxControl, CanWrite: true, MaxExpose: 1 << 20, MaxRDMA: 4096},
	},
	"messages only": {
		Limits: session.Limits{Window: session.MinWindow},
	},
	"tight ring": {
		QueueBytes: 8 << 10,
	},
}

func TestEndpoint(t *testing.T) {
	for name, cfg := range kinds {
		t.Run(name, func(t *testing.T) { run(t, cfg) })
		cfg.MaxLatency = 20 * time.Microsecond
		cfg.Faults = twin.Faults{Busy: 0.1, Short: 0.3, Stray: 0.1, Late: 0.01}
		t.Run(name+" with faults", func(t *testing.T) { run(t, cfg) })
	}
}

func run(t *testing.T, cfg twin.Config) {
	// Endpointtest does on purpose what a NIC refuses.
	cfg.Violated = func(v twin.Violation) {
		switch v.Kind {
		case twin.BadAccess, twin.RevokedAccess:
		default:
			t.Error(v)
		}
	}
	seed := uint64(0)
	endpointtest.Run(t, func() (a, b session.Endpoint, stop func(), err error) {
		seed++
		cfg.Seed = seed
		ea, eb := twin.Pair(cfg)
		return ea, eb, func() {}, nil
	})
}
