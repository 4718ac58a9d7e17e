package interop

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanproxy"
)

// Database servers, which are not written in Go. Each runs once for all tests, on TCP. What a test
// serves is a proxy between its listener and the server.

// A backend is such a server.
type backend struct {
	name string
	user string // the user that it runs as if the tests run as root
	// create and run return commands: one that makes its files in dir, and one that runs it on that
	// port.
	create, run func(dir, port string) []string
	ready       string // a line of its log when clients may connect
	stop        os.Signal

	address string
	process *exec.Cmd
	dir     string
}

var postgres = &backend{
	name: "PostgreSQL",
	user: "postgres",
	create: func(dir, _ string) []string {
		return []string{postgresBinary("initdb"), "-D", dir + "/data", "-A", "trust", "-U", "postgres", "--no-sync"}
	},
	run: func(dir, port string) []string {
		return []string{postgresBinary("postgres"), "-D", dir + "/data", "-h", "127.0.0.1", "-p", port, "-k", dir, "-F"}
	},
	ready: "database system is ready to accept connections",
	stop:  syscall.SIGINT, // PostgreSQL then does not wait for clients
}

// postgresBinary finds a program of PostgreSQL: in Debian's folder of a version, or in PATH.
func postgresBinary(name string) string {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if len(found) == 0 {
		return name
	}
	slices.Sort(found)
	return found[len(found)-1]
}

var mariadb = &backend{
	name: "MariaDB",
	user: "mysql",
	create: func(dir, _ string) []string {
		return []string{"mariadb-install-db", "--no-defaults", "--datadir=" + dir + "/data", "--tmpdir=" + dir, // its own: a server that starts deletes all temporary tables
			"--auth-root-authentication-method=normal", "--skip-test-db"}
	},
	run: func(dir, port string) []string {
		return []string{"mariadbd", "--no-defaults", "--datadir=" + dir + "/data", "--tmpdir=" + dir, "--socket=" + dir + "/socket",
			"--bind-address=127.0.0.1", "--port=" + port, "--max-allowed-packet=64M", "--innodb-flush-log-at-trx-commit=0"}
	},
	ready: "mariadbd: ready for connections",
	stop:  syscall.SIGTERM,
}

var backends = []*backend{postgres, mariadb}

// variable returns the environment variable with the backend's address, for processes that serve.
func (b *backend) variable() string { return "INTEROP_" + b.name }

// start starts the server unless it is running.
func (b *backend) start(t *testing.T) {
	t.Helper()
	if b.process != nil {
		return
	}
	var err error
	if b.dir, err = os.MkdirTemp("", "interop"); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(b.dir, 0o777); err != nil {
		t.Fatal(err)
	}
	b.address = testenv.UnusedAddress(t)
	_, port, _ := net.SplitHostPort(b.address)
	create := b.command(t, b.create(b.dir, port))
	if out, err := create.CombinedOutput(); err != nil {
		testenv.Missing(t, fmt.Sprintf("%s: %v\n%s", b.name, err, out))
	}
	log, err := os.Create(b.dir + "/log")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	b.process = b.command(t, b.run(b.dir, port))
	b.process.Stdout, b.process.Stderr = log, log
	if err := b.process.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, func() error {
		text, err := os.ReadFile(log.Name())
		if err == nil && !strings.Contains(string(text), b.ready) {
			err = fmt.Errorf("%s is not ready:\n%s", b.name, text)
		}
		return err
	})
	os.Setenv(b.variable(), b.address)
}

// command returns a command that runs as the server's user, and not longer than the tests.
func (b *backend) command(t *testing.T, args []string) *exec.Cmd {
	t.Helper()
	if os.Getuid() == 0 {
		u, err := user.Lookup(b.user)
		if err != nil {
			testenv.Missing(t, fmt.Sprintf("%s: %v", b.name, err))
		}
		args = append([]string{"setpriv", "--reuid", u.Uid, "--regid", u.Gid, "--clear-groups"}, args...)
	}
	cmd := exec.Command("timeout", append([]string{"--kill-after=5", "900"}, args...)...)
	cmd.Dir = b.dir
	return cmd
}

// stopBackends stops the servers that the tests have started.
func stopBackends() {
	for _, b := range backends {
		if b.process != nil {
			b.process.Process.Signal(b.stop)
			b.process.Wait()
		}
		os.RemoveAll(b.dir)
	}
}

// serve forwards l's connections to the server.
func (b *backend) serve(l net.Listener) func() error {
	address := os.Getenv(b.variable())
	proxy := &sanproxy.Proxy{Dial: func(ctx context.Context, _ net.Conn) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", address)
	}}
	return inBackground(func() error { return proxy.Serve(l) }, proxy.Close, nil)
}
