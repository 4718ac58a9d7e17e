//go:build linux

package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// BenchmarkTCP compares a connection that stays on TCP with plain net's, in processes that take
// turns: switched off, and with a server that is plain. It reports the ratios of their fastest
// round trips, and by how many nanoseconds a Read of no bytes differs. An iteration is a round.
func BenchmarkTCP(b *testing.B) {
	dir := b.TempDir()
	if err := os.CopyFS(dir, os.DirFS("testdata/pingpong")); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module example.com/pingpong\n\ngo 1.26\n"), 0o666); err != nil {
		b.Fatal(err)
	}
	b.Chdir(dir)
	b.Setenv("SAN_SOURCE", source)
	if code := run(stdio{nil, os.Stderr, os.Stderr}, []string{"build", "-o", "built", "."}); code != 0 {
		b.Fatal(code)
	}
	if out, err := exec.Command("go", "build", "-o", "plain", ".").CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	server := exec.Command("./plain")
	stdout, err := server.StdoutPipe()
	if err == nil {
		err = server.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	defer server.Wait()
	defer server.Process.Kill()
	address, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	client := func(file string, env ...string) (roundTrip, look float64) {
		cmd := exec.Command(file, strings.TrimSpace(address))
		cmd.Env = append(os.Environ(), env...)
		out, err := cmd.Output()
		if err == nil {
			_, err = fmt.Sscan(string(out), &roundTrip, &look)
		}
		if err != nil {
			b.Fatal(err)
		}
		return roundTrip, look
	}
	var least [6]float64 // of a machine that is others' as well, the least is what it costs
	for n := 0; b.Loop(); n++ {
		for i, env := range [][]string{{"./plain"}, {"./built", "SAN_PROVIDERS=none"}, {"./built"}} {
			roundTrip, look := client(env[0], env[1:]...)
			for j, value := range []float64{roundTrip, look} {
				if at := &least[2*i+j]; n == 0 || value < *at {
					*at = value
				}
			}
		}
	}
	b.ReportMetric(least[2]/least[0], "off/plain")
	b.ReportMetric(least[4]/least[0], "on/plain")
	b.ReportMetric(least[3]-least[1], "off-ns")
	b.ReportMetric(least[5]-least[1], "on-ns")
}
