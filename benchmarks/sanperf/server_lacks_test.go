package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/sanconn/san"
)

// That a host has no RDMA does not look like a failure; that RDMA fails does.
func TestWhatAServerLacks(t *testing.T) {
	cause := errors.New("no such device")
	for reason, want := range map[san.Reason]bool{
		san.ReasonNoProvider: false, san.ReasonNotServed: false,
		san.ReasonPermission: true, san.ReasonResources: true,
	} {
		text := lackText("verbs", &san.Unavailable{Reason: reason, Err: cause})
		if failed := strings.Contains(text, cause.Error()); failed != want || !strings.Contains(text, "verbs") || !strings.Contains(text, "TCP") {
			t.Errorf("%v: %q", reason, text)
		}
		if strings.Contains(text, "cannot listen") { // shm without its directory serves this network namespace
			t.Errorf("%v: %q", reason, text)
		}
	}
}
