package regcache

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// A forked child does not get the arena's memory, to which a device writes.
func TestAForkedChildDoesNotGetArenaMemory(t *testing.T) {
	a := NewArena(64<<10, 64<<10)
	defer a.Close()
	b := get(t, a, 4096)
	defer b.Put()
	at := addressOf(b.Bytes())
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	inside := false
	for line := range strings.Lines(string(smaps)) {
		var lo, hi uintptr
		if n, _ := fmt.Sscanf(line, "%x-%x", &lo, &hi); n == 2 {
			inside = lo <= at && at < hi
		}
		if flags, ok := strings.CutPrefix(line, "VmFlags:"); ok && inside {
			if !strings.Contains(flags, " dc") { // do not copy on fork, see proc_pid_smaps(5)
				t.Errorf("the flags are%s", flags)
			}
			return
		}
	}
	t.Error("the memory is not mapped")
}
