package main

import (
	"fmt"
	"os"
	"runtime/debug"
	"strings"
)

// ownMemory is what this process uses of memory that no file has, in bytes. What it shares
// counts in equal parts for all that share it. The kernel's own, as for sockets, is not in it.
func ownMemory() (total int64, err error) {
	debug.FreeOSMemory()
	text, err := os.ReadFile("/proc/self/smaps_rollup")
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(string(text), "\n") {
		var kB int64
		for _, kind := range []string{"Pss_Anon: %d kB", "Pss_Shmem: %d kB"} {
			if n, _ := fmt.Sscanf(line, kind, &kB); n == 1 {
				total += kB << 10
			}
		}
	}
	return total, nil
}
