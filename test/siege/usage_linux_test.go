package siege

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// usage is what a process uses, from /proc.
type usage struct {
	descriptors int
	threads     int
	anonymous   int64 // bytes: heap and stacks
	shared      int64 // bytes of shared memory that it has touched
	space       int64 // bytes of address space
	cpu         time.Duration
	at          time.Time
}

func (u usage) String() string {
	return fmt.Sprintf("%d descriptors, %d threads, %d MB of its own, %d MB shared, %d MB of addresses",
		u.descriptors, u.threads, u.anonymous>>20, u.shared>>20, u.space>>20)
}

func usageOf(t *testing.T, pid int) (u usage) {
	t.Helper()
	u.at = time.Now()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	u.descriptors = len(fds)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(status), "\n") {
		name, rest, _ := strings.Cut(line, ":")
		f := strings.Fields(rest)
		if len(f) == 0 {
			continue
		}
		n, _ := strconv.ParseInt(f[0], 10, 64)
		switch name {
		case "Threads":
			u.threads = int(n)
		case "RssAnon":
			u.anonymous = n << 10
		case "RssShmem":
			u.shared = n << 10
		case "VmSize":
			u.space = n << 10
		}
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:]) // fields from number 3 on
	for _, i := range []int{14, 15} {
		ticks, _ := strconv.ParseInt(string(f[i-3]), 10, 64)
		u.cpu += time.Duration(ticks) * 10 * time.Millisecond // USER_HZ is 100
	}
	return u
}

// processors returns how many processors a process has used since an earlier usage, without the time
// that it has spent for others.
func (u usage) processors(since usage, others time.Duration) float64 {
	return float64(u.cpu-since.cpu-others) / float64(u.at.Sub(since.at))
}

// worst returns the larger of each value.
func worst(a, b usage) usage {
	return usage{
		descriptors: max(a.descriptors, b.descriptors),
		threads:     max(a.threads, b.threads),
		anonymous:   max(a.anonymous, b.anonymous),
		shared:      max(a.shared, b.shared),
		space:       max(a.space, b.space),
		cpu:         max(a.cpu, b.cpu),
		at:          b.at,
	}
}
