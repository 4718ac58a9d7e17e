//go:build linux

package main

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// BenchmarkTCP compares a connection that stays on TCP with plain net's, in processes that take
// turns: switched off, and with a server that is plain. It reports the medians of the ratios of
// their round trips, and by how many nanoseconds a Read of no bytes differs; for plain net once
// more, too, which shows what of that is the machine's. An iteration is a round of four processes
// in a random order; of less than twenty, the figures say little.
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
	ways := [...]struct {
		name, file string
		env        []string
	}{{"plain", "./plain", nil}, {"again", "./plain", nil}, {"off", "./built", []string{"SAN_PROVIDERS=none"}}, {"on", "./built", nil}}
	var trips, looks [len(ways)][]float64 // ratios and differences to plain, by round
	for b.Loop() {
		var trip, look [len(ways)]float64
		for _, i := range rand.Perm(len(ways)) {
			trip[i], look[i] = client(ways[i].file, ways[i].env...)
		}
		for i := range ways {
			trips[i] = append(trips[i], trip[i]/trip[0])
			looks[i] = append(looks[i], look[i]-look[0])
		}
	}
	for i, way := range ways[1:] {
		b.ReportMetric(median(trips[i+1]), way.name+"/plain")
		b.ReportMetric(median(looks[i+1]), way.name+"-ns")
	}
}

func median(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/2]
}
