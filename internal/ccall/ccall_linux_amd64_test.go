package ccall

import (
	"bytes"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"runtime/pprof"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// loop is what a C compiler could make of a function void loop(struct args *a): it uses
// half of the stack, adds up 1 to n, and leaves no register as it was that it need not.
var loop = []byte{
	0x55, 0x48, 0x89, 0xe5, 0x53, 0x41, 0x54, 0x41, 0x55, 0x41, 0x56, 0x41, 0x57, // push rbp; mov rbp, rsp; push rbx, r12, r13, r14, r15
	0x48, 0x89, 0x6f, 0x08, // mov [rdi+8], rbp
	0x48, 0x89, 0xbc, 0x24, 0x00, 0x80, 0xff, 0xff, // mov [rsp-0x8000], rdi
	0x48, 0x8b, 0x1f, 0x31, 0xc0, // mov rbx, [rdi]; xor eax, eax
	0x48, 0x01, 0xd8, 0x48, 0xff, 0xcb, 0x75, 0xf8, // 1: add rax, rbx; dec rbx; jne 1b
	0x48, 0x89, 0x47, 0x10, // mov [rdi+16], rax
	0x48, 0xc7, 0xc7, 0xff, 0xff, 0xff, 0xff, 0x48, 0x89, 0xfe, 0x48, 0x89, 0xfa, 0x48, 0x89, 0xf9, 0x49, 0x89, 0xf8, 0x49, 0x89, 0xf9, 0x49, 0x89, 0xfa, 0x49, 0x89, 0xfb, // mov rdi, -1; mov rsi, rdx, rcx, r8, r9, r10, r11, rdi
	0x49, 0x89, 0xfc, 0x49, 0x89, 0xfd, 0x49, 0x89, 0xfe, 0x49, 0x89, 0xff, // mov r12, r13, r14, r15, rdi
	0x66, 0x0f, 0x76, 0xc0, 0x66, 0x44, 0x0f, 0x6f, 0xf0, 0x66, 0x44, 0x0f, 0x6f, 0xf8, // pcmpeqd xmm0, xmm0; movdqa xmm14, xmm15, xmm0
	0x41, 0x5f, 0x41, 0x5e, 0x41, 0x5d, 0x41, 0x5c, 0x5b, 0x5d, 0xc3, // pop r15, r14, r13, r12, rbx, rbp; ret
}

// args of loop.
type args struct {
	n, frame, sum uint64
}

// executable is the address of code.
func executable(t testing.TB, code []byte) uintptr {
	t.Helper()
	b, err := unix.Mmap(-1, 0, len(code), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	copy(b, code)
	if err := unix.Mprotect(b, unix.PROT_READ|unix.PROT_EXEC); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(b) })
	return uintptr(unsafe.Pointer(&b[0]))
}

// C functions run in goroutines beside one another, while collections stop and move what
// they can, the scheduler preempts what it can, and a profile looks where all of them are.
func TestCallUnderSignals(t *testing.T) {
	fn := executable(t, loop)
	var profile bytes.Buffer
	if err := pprof.StartCPUProfile(&profile); err != nil {
		t.Fatal(err)
	}
	defer pprof.StopCPUProfile()
	stop := time.Now().Add(time.Second)
	var wg, all sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, 2))
			for time.Now().Before(stop) {
				// Of other depth and size each time, so that stacks grow, move and shrink.
				if !descend(t, fn, rnd.IntN(100), 1+rnd.Uint64N(50_000)) {
					return
				}
			}
		})
	}
	done := make(chan struct{})
	all.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				runtime.GC()
			}
		}
	})
	wg.Wait()
	close(done)
	all.Wait()
}

func descend(t *testing.T, fn uintptr, depth int, n uint64) bool {
	var room [256]byte
	if depth > 0 {
		return descend(t, fn, depth-1, n) && room == [256]byte{}
	}
	a := args{n: n}
	if !Call(fn, unsafe.Pointer(&a)) {
		t.Error("there is no stack")
		return false
	}
	var zero [64]byte // by the register that is always zero in Go
	for _, b := range zero {
		if b != 0 {
			t.Error("a register is not as Go wants it")
			return false
		}
	}
	here := uint64(uintptr(unsafe.Pointer(&zero)))
	if a.sum != n*(n+1)/2 || a.frame%16 != 0 || a.frame-here+1<<20 < 1<<21 {
		t.Errorf("adding up 1 to %d gives %d, on a stack at %#x (Go's: %#x)", n, a.sum, a.frame, here)
		return false
	}
	return true
}

// Stacks that are not in use are used again, and no more are kept than there are places.
func TestStacksAreUsedAgain(t *testing.T) {
	fn := executable(t, loop)
	frames := make(map[uint64]bool)
	for range 1000 {
		a := args{n: 1}
		if !Call(fn, unsafe.Pointer(&a)) {
			t.Fatal("there is no stack")
		}
		frames[a.frame] = true
	}
	if len(frames) > len(shelf) {
		t.Errorf("%d stacks for one call at a time", len(frames))
	}
}

// A C function that crashes ends the program, whatever would recover, and says where.
func TestCrashEndsTheProgram(t *testing.T) {
	const variable = "SAN_TEST_CRASH"
	if os.Getenv(variable) != "" {
		fn := executable(t, []byte{0x31, 0xc0, 0x48, 0x8b, 0x00, 0xc3}) // xor eax, eax; mov rax, [rax]; ret
		defer func() {
			recover()
			os.Exit(0)
		}()
		Call(fn, unsafe.Pointer(&args{}))
	}
	child := exec.Command(os.Args[0], "-test.run=^TestCrashEndsTheProgram$")
	child.Env = append(os.Environ(), variable+"=1")
	out, err := child.CombinedOutput()
	if err == nil || !bytes.Contains(out, []byte("fatal error")) || !bytes.Contains(out, []byte("ccall.call")) {
		t.Errorf("%v\n%s", err, out)
	}
}

func BenchmarkCall(b *testing.B) {
	fn := executable(b, loop)
	a := args{}
	for b.Loop() {
		a.n = 1
		Call(fn, unsafe.Pointer(&a))
	}
}
