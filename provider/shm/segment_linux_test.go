package shm

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm/internal/quota"
	"github.com/sanconn/san/provider/shm/internal/ring"
)

// memfd makes a memfd with the given size and seals.
func memfd(t *testing.T, size int64, seals, flags int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if seals != 0 {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
	}
	return fd
}

// If a 32-bit process has no addresses for a segment of a 64-bit peer, that is no breach by the peer,
// and existing connections go on. (Only 32-bit builds test this: .ci/run cross.)
func TestSegmentBeyondTheAddresses(t *testing.T) {
	m, err := mapHalf(memfd(t, halfSize(mostSlots), halfSeals, 0), mostSlots, accountOf(1), false)
	m.unmap()
	if math.MaxInt > math.MaxInt32 {
		if err != nil {
			t.Error(err)
		}
	} else if !errors.Is(err, unix.ENOMEM) || errors.Is(err, errSegment) {
		t.Errorf("%v, want it to be for want of addresses", err)
	}
	m, fd, err := newHalf(mostSlots, ownAccount(), false)
	if err == nil {
		unix.Close(fd)
		m.unmap()
	}
	if err != nil && (math.MaxInt > math.MaxInt32 || !errors.Is(err, unix.ENOMEM)) {
		t.Errorf("one of this end's: %v", err)
	}
}

func TestSegmentsThatCouldHurtAreRefused(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	right := halfSize(firstSlots)
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	file.Truncate(int64(right))
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	for _, tc := range []struct {
		name  string
		fd    int
		slots uint32
	}{
		{"unsealed", memfd(t, right, 0, 0), firstSlots},
		{"can shrink", memfd(t, right, unix.F_SEAL_GROW|unix.F_SEAL_SEAL, 0), firstSlots},
		{"can grow", memfd(t, right, unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL, 0), firstSlots},
		{"can be sealed", memfd(t, right, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW, 0), firstSlots},
		{"too small", memfd(t, right-pageSize, halfSeals, 0), firstSlots},
		{"too large", memfd(t, right+pageSize, halfSeals, 0), firstSlots},
		{"empty", memfd(t, 0, halfSeals, 0), firstSlots},
		{"fewer slots than are due", memfd(t, halfSize(1), halfSeals, 0), 1},
		{"no slots", memfd(t, halfSize(0), halfSeals, 0), 0},
		{"too many slots", memfd(t, halfSize(mostSlots+1), halfSeals, 0), mostSlots + 1},
		{"endless slots", memfd(t, right, halfSeals, 0), 1<<32 - 1},
		{"a file", int(file.Fd()), firstSlots},
		{"a pipe", pipe[0], firstSlots},
		{"huge pages", memfd(t, right+(2<<20-right%(2<<20))%(2<<20), halfSeals, unix.MFD_HUGETLB), firstSlots},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := dialRaw(t, l)
			s.send(linkRequest(version, tc.slots), tc.fd, doorbellEnd(t))
			if last := s.awaitHangUp(); last.kind == msgLinkReply && last.code == codeOK {
				t.Error("welcomed")
			}
			s = dialRaw(t, l)
			s.handshake()
			s.send((&message{kind: msgSegment, number: tc.slots}).encode(), tc.fd)
			s.awaitHangUp()
			servesOthers(t, l)
		})
	}
}

// Mappings are bounded in bytes and in number. A mapping that fails is not counted.
func TestMappingsAreBounded(t *testing.T) {
	right := memfd(t, halfSize(firstSlots), halfSeals, 0)
	size := halfSize(firstSlots)
	for name, c := range map[string]struct {
		fd              int
		space, mappings int64
		user            quota.Holder
		want            error
	}{
		"own":             {right, size, 1, quota.Own, nil},
		"own bytes":       {right, size - 1, 1, quota.Own, unix.ENOMEM},
		"own number":      {right, size, 0, quota.Own, unix.ENOMEM},
		"a user's":        {right, 2 * size, 2, 1, nil},
		"a user's bytes":  {right, 2*size - 1, 2, 1, unix.ENOMEM},
		"a user's number": {right, 2 * size, 1, 1, unix.ENOMEM},
		"no memory":       {-1, 2 * size, 2, 1, unix.EBADF},
	} {
		t.Run(name, func(t *testing.T) {
			leaks(t)
			withLimits(t, limits{addressSpace: c.space, mappings: c.mappings})
			m, err := newMapping(c.fd, firstSlots, account{held, c.user}, unix.PROT_READ)
			if !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			if err == nil && (held.space.Used() != size || held.mappings.Used() != 1) {
				t.Errorf("by the books %+v", inUse())
			}
			m.unmap()
			if inUse() != (limits{}) {
				t.Errorf("by the books %+v", inUse())
			}
		})
	}
}

// A memfd of huge pages belongs to another file system, and is refused for that, whatever its size.
func TestHugePagesAreRefused(t *testing.T) {
	fd := memfd(t, 2<<20, halfSeals, unix.MFD_HUGETLB)
	if err := checkHalf(fd, firstSlots, halfSeals); !errors.Is(err, errSegment) || !strings.Contains(err.Error(), "file system") {
		t.Errorf("got %v", err)
	}
}

// A segment has memory only where it was touched, even in a process that locks all of its memory.
// Neither a core dump nor huge pages nor a child give it more.
func TestSegmentsStaySparse(t *testing.T) {
	testenv.NeedRoot(t)
	c := spawn(t, "locked", nil)
	var flags string
	var size, resident int
	if _, err := fmt.Sscanf(c.line(t, "mapped"), "%d %d %q", &size, &resident, &flags); err != nil {
		t.Fatal(err)
	}
	if resident > 64 {
		t.Errorf("%d KiB of %d are resident", resident, size)
	}
	for _, flag := range []string{"rd", "wr", "dc", "dd", "nh"} { // proc_pid_smaps(5)
		if !strings.Contains(flags, flag) {
			t.Errorf("no %s in %s", flag, flags)
		}
	}
	if strings.Contains(flags, "lo") {
		t.Errorf("locked: %s", flags)
	}
}

// Pages that a process has locked after they were mapped can still be returned.
func TestLockedRingIsGivenBack(t *testing.T) {
	testenv.NeedRoot(t)
	c := spawn(t, "locked later", nil)
	var before, after int64
	if _, err := fmt.Sscanf(c.line(t, "bytes"), "%d %d", &before, &after); err != nil {
		t.Fatal(err)
	}
	if before < ring.Size || after > before-ring.Size {
		t.Errorf("%d bytes before, %d after", before, after)
	}
}

func init() {
	// Returns the memory of a locked ring, and prints the segment's memory before and after.
	roles["locked later"] = func() error {
		m, fd, err := newHalf(firstSlots, ownAccount(), false)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.Mlockall(unix.MCL_CURRENT); err != nil {
			return err
		}
		var before, after unix.Stat_t
		if err := unix.Fstat(fd, &before); err != nil {
			return err
		}
		if !punchHole(m.part(0).ring, 0, budget().Of(quota.Own)) {
			return errors.New("it keeps its memory")
		}
		if err := unix.Fstat(fd, &after); err != nil {
			return err
		}
		fmt.Printf("bytes %d %d\n", before.Blocks*512, after.Blocks*512)
		return nil
	}
	// Maps a segment, and prints how much memory it has.
	roles["locked"] = func() error {
		if err := unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE); err != nil {
			return err
		}
		m, fd, err := newHalf(firstSlots, ownAccount(), false)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		m.mem[0] = 1
		smaps, err := os.ReadFile("/proc/self/smaps")
		if err != nil {
			return err
		}
		_, of, _ := strings.Cut(string(smaps), "memfd:san-shm")
		field := func(name string) string {
			_, rest, _ := strings.Cut(of, "\n"+name+":")
			line, _, _ := strings.Cut(rest, "\n")
			return strings.TrimSuffix(strings.TrimSpace(line), " kB")
		}
		fmt.Printf("mapped %s %s %q\n", field("Size"), field("Rss"), field("VmFlags"))
		return nil
	}
}
