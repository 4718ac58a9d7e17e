package main

import (
	"bytes"
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestUsage(t *testing.T) {
	for name, tt := range map[string]struct {
		args []string
		want string // part of the error
	}{
		"nothing":           {nil, "-listen and -to are missing"},
		"no -to":            {[]string{"-listen", "tcp:127.0.0.1:0"}, "-listen tcp:127.0.0.1:0 has no -to behind it"},
		"two -listen":       {[]string{"-listen", "tcp:127.0.0.1:0", "-listen", "tcp:127.0.0.1:0"}, "-listen tcp:127.0.0.1:0 before it has no -to"},
		"-to first":         {[]string{"-to", "unix:/run/x"}, "it has no -listen before it"},
		"no network":        {[]string{"-listen", "127.0.0.1:5432"}, "must begin with san:, tcp: or unix:"},
		"no port":           {[]string{"-listen", "san:127.0.0.1"}, "missing port in address; it must be san:HOST:PORT"},
		"no such port":      {[]string{"-listen", "tcp::0", "-to", "tcp:127.0.0.1:70000"}, "address 70000: invalid port; it must be tcp:HOST:PORT"},
		"no path":           {[]string{"-listen", "unix:"}, "no path"},
		"both policies":     {[]string{"-never", "-require", "-listen", "tcp::0", "-to", "unix:x"}, "exclude each other"},
		"mode":              {[]string{"-mode", "rw"}, "not permissions in octal"},
		"counters by a SAN": {[]string{"-stats", "san:127.0.0.1:0"}, "not a tcp: or unix: address"},
		"argument":          {[]string{"-listen", "tcp::0", "-to", "unix:x", "more"}, `unexpected argument "more"`},
	} {
		t.Run(name, func(t *testing.T) {
			var out, err bytes.Buffer
			if code := run(t.Context(), stdio{&out, &err}, tt.args); code != exitUsage {
				t.Errorf("exit code %d", code)
			}
			if got := err.String(); !strings.Contains(got, tt.want) || strings.Count(got, "\n") != 1 {
				t.Errorf("error %q, want one line with %q", got, tt.want)
			}
		})
	}
}

func TestHelp(t *testing.T) {
	var out, err bytes.Buffer
	if code := run(t.Context(), stdio{&out, &err}, []string{"-h"}); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	for _, word := range []string{"usage: sanproxy", "san:HOST:PORT", "-proxy-protocol", "-drain"} {
		if !strings.Contains(err.String(), word) {
			t.Errorf("%q is missing in:\n%s", word, err.String())
		}
	}
}

// If one of the addresses cannot be listened on, the error names it, and no other stays open.
func TestCannotListen(t *testing.T) {
	_, taken := listenTCP(t)
	path := filepath.Join(t.TempDir(), "s")
	var out, errs bytes.Buffer
	args := []string{"-listen", "unix:" + path, "-to", taken.String(), "-listen", taken.String(), "-to", "unix:x"}
	if code := run(t.Context(), stdio{&out, &errs}, args); code != exitFailed {
		t.Errorf("exit code %d", code)
	}
	if got := errs.String(); !strings.Contains(got, "cannot listen on "+taken.String()) || !strings.Contains(got, "address already in use") {
		t.Errorf("error %q", got)
	}
	if _, err := os.Lstat(path); err == nil {
		t.Error("the socket file is still there")
	}
}

// The socket file has the mode of -mode, whatever the umask is.
func TestSocketMode(t *testing.T) {
	for _, mode := range []fs.FileMode{0o600, 0o660, 0o777} {
		path := filepath.Join(t.TempDir(), "s")
		l, err := listenUnix(context.Background(), path, &mode)
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Lstat(path)
		if err != nil || info.Mode().Perm() != mode {
			t.Errorf("%v, %v; want %v", info.Mode(), err, mode)
		}
		l.Close()
	}
}
