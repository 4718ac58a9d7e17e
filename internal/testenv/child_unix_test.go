//go:build unix

package testenv

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"
)

const envHangs = "SAN_TEST_HANGS"

func TestMain(m *testing.M) {
	if os.Getenv(envHangs) != "" {
		hangs()
	}
	os.Exit(m.Run())
}

// hangs is the function in which a process that does not end stays.
//
//go:noinline
func hangs() {
	go func() { // sent once it sleeps: the stack of a goroutine that runs on another thread than SIGQUIT's is not shown
		for b := make([]byte, 64<<10); !bytes.Contains(b[:runtime.Stack(b, true)], []byte("goroutine 1 [sleep")); {
			runtime.Gosched()
		}
		fmt.Println("begins")
	}()
	for {
		time.Sleep(time.Hour)
	}
}

// A process that does not end, or does not write what it should, fails its test, which names its role
// and shows where it is.
func TestProcessThatHangsIsReported(t *testing.T) {
	for name, report := range map[string]func(testing.TB, *exec.Cmd){
		"did not end":   func(t testing.TB, c *exec.Cmd) { Ended(t, "the role", c, time.Millisecond) },
		"did not speak": func(t testing.TB, c *exec.Cmd) { Hung(t, "the role", c, "speak") },
	} {
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), envHangs+"=1")
		var shown bytes.Buffer
		child.Stderr = &shown
		stdout, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "begins\n" {
			t.Fatalf("%q, %v", line, err)
		}
		e := &ending{}
		func() {
			defer func() { recover() }()
			report(e, child)
		}()
		if e.how != "failed" || !strings.Contains(e.why, name) || !strings.Contains(e.why, `"the role"`) {
			t.Errorf("%s: it %s: %s", name, e.how, e.why)
		}
		if !strings.Contains(shown.String(), "testenv.hangs(") {
			t.Errorf("%s: it shows no goroutine that hangs:\n%s", name, &shown)
		}
	}
}

// If a process ends, the test decides whether it has ended as it should.
func TestProcessThatEnds(t *testing.T) {
	child := exec.Command(os.Args[0], "-test.run=^$")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if err := Ended(t, "the role", child, time.Minute); err != nil {
		t.Error(err)
	}
}
