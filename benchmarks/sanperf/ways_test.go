package main

import (
	"strings"
	"testing"
)

// The result of a measurement through package san ends with how its bytes went; that of plain TCP does
// not.
func TestResultsEndWithHowBytesWent(t *testing.T) {
	server := serverProcess(t)
	for _, to := range server.ready[:3] {
		out := mustRun(t, "client", "-both", "-time", "20ms", to.String())
		lines := strings.Split(strings.TrimSpace(out), "\n")
		last := lines[len(lines)-1]
		if told := strings.HasPrefix(last, "how bytes went:"); told != (to.transport == "san") {
			t.Errorf("%v: %s", to, last)
		} else if want := "messages 100.0 %"; told && sanProvider() == "shm" && !strings.Contains(last, want) {
			t.Errorf("%v: %s; want %s", to, last, want)
		}
	}
}

func TestWaysAreOfTheirOwnTime(t *testing.T) {
	before := ways{OwnMemory: 1, Hits: 5}
	after := ways{OwnMemory: 4, Hits: 7, Box: 1, Unregistered: 3}
	if got := after.since(before); got != (ways{OwnMemory: 3, Hits: 2, Box: 1, Unregistered: 3}) || after.OwnMemory != 4 {
		t.Errorf("%+v of %+v", got, after)
	}
	if cells := after.cells(); cells[0] != "80.0 %" || cells[1] != "20.0 %" || cells[5] != "7" || cells[6] != "3" {
		t.Errorf("%v", cells)
	}
}
