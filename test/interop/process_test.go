package interop

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/test/hwsim"
)

// This binary is run again as the server of a program. It prints its address. When its standard input
// ends, it stops the server, and prints what carried its connections and, if something went wrong, the
// error.
const (
	serverVar = "INTEROP_SERVER" // the program's name
	wayVar    = "INTEROP_WAY"    // the way's name
	failure   = "error: "
)

func TestMain(m *testing.M) {
	hwsim.Use() // when TestProgramsOnTheSimulatedDevice runs these tests
	if name := os.Getenv(serverVar); name != "" {
		if err := serveAlone(name, os.Getenv(wayVar)); err != nil {
			fmt.Println(failure + strings.ReplaceAll(err.Error(), "\n", "; "))
		}
		return
	}
	if os.Getenv(flipVar) != "" {
		if err := serveUpgradable(); err != nil {
			fmt.Println(failure + err.Error())
			os.Exit(1)
		}
		return
	}
	code := m.Run()
	stopBackends()
	os.Exit(code)
}

func serveAlone(program, way string) error {
	for _, p := range programs {
		for _, w := range ways {
			if p.name != program || w.name != way {
				continue
			}
			l, err := w.listen()
			if err != nil {
				return err
			}
			var accepted record
			stop := p.serve(accepted.listener(l))
			fmt.Println(l.Addr())
			io.Copy(io.Discard, os.Stdin)
			err = stop()
			for _, carrier := range accepted.carriers() {
				fmt.Println(carrier)
			}
			return err
		}
	}
	return fmt.Errorf("no program %q or way %q", program, way)
}

// serveElsewhere starts a process that serves the program.
func (w way) serveElsewhere(t *testing.T, p program) (address string, stop func() ([]string, error)) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(append(os.Environ(), serverVar+"="+p.name, wayVar+"="+w.name), w.env...)
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) } // makes it print the stacks of all goroutines
	cmd.WaitDelay = time.Second
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	t.Cleanup(func() {
		if !ended { // the test has failed before that
			cancel()
			cmd.Wait()
		}
	})
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() {
		t.Fatal("the server's process ends before it serves")
	}
	return lines.Text(), func() (accepted []string, err error) {
		stdin.Close()
		for lines.Scan() {
			if text, failed := strings.CutPrefix(lines.Text(), failure); failed {
				err = errors.Join(err, errors.New(text))
			} else {
				accepted = append(accepted, lines.Text())
			}
		}
		ended = true
		return accepted, errors.Join(err, cmd.Wait())
	}
}
