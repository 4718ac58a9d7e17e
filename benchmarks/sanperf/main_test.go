package main

import (
	"bytes"
	"context"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

// asSanperf is set in the environment of this test binary if it has to run sanperf, as when compare
// starts its server process.
const asSanperf = "SANPERF_TEST_IS_SANPERF"

func TestMain(m *testing.M) {
	if os.Getenv(asSanperf) != "" {
		main()
		return
	}
	os.Setenv(asSanperf, "1")
	os.Exit(m.Run())
}

// sanProvider returns the provider to which a san: connection over loopback has to move here.
func sanProvider() string {
	if runtime.GOOS == "linux" {
		return "shm"
	}
	return "tcp"
}

// sanperf runs one command line in this process.
func sanperf(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(t.Context(), stdio{strings.NewReader(""), &out, &err}, args)
	return code, out.String(), err.String()
}

// mustRun runs a command line that has to succeed.
func mustRun(t *testing.T, args ...string) (stdout string) {
	t.Helper()
	code, stdout, stderr := sanperf(t, args...)
	if code != exitOK {
		t.Fatalf("sanperf %s: exit code %d: %s", strings.Join(args, " "), code, stderr)
	}
	return stdout
}

// serverProcess starts a server process that ends with the test.
func serverProcess(t *testing.T) *child {
	t.Helper()
	c, err := startServer(context.Background(), stdio{err: testWriter{t}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.stop() })
	return c
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("server: %s", bytes.TrimSpace(p))
	return len(p), nil
}

func TestHelpListsEveryCommand(t *testing.T) {
	out := mustRun(t, "help")
	for _, c := range commands {
		if !strings.Contains(out, c.name) || !strings.Contains(out, c.summary) {
			t.Errorf("%q is not in the help:\n%s", c.name, out)
		}
	}
}

func TestEachCommandExplainsItsFlags(t *testing.T) {
	for _, c := range commands {
		if c.name == "help" {
			continue
		}
		code, _, stderr := sanperf(t, c.name, "-h")
		if code != exitOK || !strings.Contains(stderr, "usage: sanperf "+c.name) || !strings.Contains(stderr, "  -") {
			t.Errorf("%s -h: exit code %d:\n%s", c.name, code, stderr)
		}
	}
}

// -h without a command shows the flags of compare, and has to mention the other commands.
func TestHelpWithoutACommandNamesTheList(t *testing.T) {
	if code, _, stderr := sanperf(t, "-h"); code != exitOK || !strings.Contains(stderr, `"sanperf help"`) {
		t.Errorf("exit code %d:\n%s", code, stderr)
	}
}

// full is a disk without free space.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

func TestAResultThatCannotBePrintedIsAFailure(t *testing.T) {
	for _, args := range [][]string{{"help"}, {"devices"}, {"devices", "-json"}} {
		var err bytes.Buffer
		code := run(t.Context(), stdio{strings.NewReader(""), full{}, &err}, args)
		if code != exitFailed || !strings.Contains(err.String(), syscall.ENOSPC.Error()) {
			t.Errorf("sanperf %s: exit code %d: %s", strings.Join(args, " "), code, &err)
		}
	}
}

func TestAWrongCommandLineIsExplainedInOneLine(t *testing.T) {
	for _, test := range []struct {
		args string
		want string
	}{
		{"serve", `unknown command "serve"`},
		{"client", "address is missing"},
		{"client localhost extra", `unexpected argument "extra"`},
		{"server extra", `unexpected argument "extra"`},
		{"client localhost -bogus", "-bogus"},
		{"client localhost -size 12Q", "not a size such as"},
		{"client localhost -size 0", "outside 1 B to"},
		{"client localhost -size 2G", "outside 1 B to"},
		{"client localhost -size 2147483648", "outside 1 B to"},
		{"client localhost -size 99999999999999999999", "outside 1 B to"},
		{"client localhost -size -1", "not a size such as"},
		{"client localhost -time never", "not a time such as"},
		{"client localhost -time -3s", "must be above 0"},
		{"client localhost -time 9999h", "must be above 0"},
		{"client localhost -interval 0", "must be above 0"},
		{"client localhost -parallel 0", "0 streams"},
		{"client localhost -parallel many", "parse error"},
		{"client localhost -reverse -both", "exclude each other"},
		{"client localhost -latency -both", "exclude each other"},
		{"client unix:", "empty"},
		{"client a:b:c", "too many colons"},
		{"client [::1", "missing"},
		{"server -l unix:", "empty"},
		{"devices localhost extra", `unexpected argument "extra"`},
		{"devices tcp:localhost", "only a san: address"},
		{"devices unix:/tmp/x", "only a san: address"},
		{"devices a:b:c", "too many colons"},
		{"compare -rounds 0", "0 rounds"},
		{"-rounds 0", "0 rounds"},
		{"compare unix:/tmp/x", "no TCP or SAN"},
		{"compare -simulate nonsense", "there are mlx5-roce,"},
		{"compare -simulate mlx5-roce localhost", "its own server"},
	} {
		code, stdout, stderr := sanperf(t, strings.Fields(test.args)...)
		if code != exitUsage || !strings.Contains(stderr, test.want) || strings.Count(stderr, "\n") != 1 || stdout != "" {
			t.Errorf("sanperf %s: exit code %d, want %d and %q:\n%s%s", test.args, code, exitUsage, test.want, stdout, stderr)
		}
	}
}
