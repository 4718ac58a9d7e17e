package main

import (
	"fmt"
	"os"
	"runtime/debug"
	"strings"
)

// ownMemory returns how many bytes of memory this process uses that belong to no file on disk. Shared
// memory counts in equal parts for all processes that share it. Memory of the kernel, as for sockets, is
// not included.
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
