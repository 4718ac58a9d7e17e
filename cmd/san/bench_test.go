//go:build linux

package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// BenchmarkTCP compares a connection that stays on TCP, in programs built by san, with plain net's: with
// SANs switched off, and with a plain peer. The processes take turns. It reports the medians of the
// ratios of their round trips, and the differences in nanoseconds. It also compares plain net with
// itself, which shows how exact the machine is. An iteration is a round of four processes in a random
// order; with less than twenty rounds the figures mean little.
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
	measure := func(file string, env ...string) (roundTrip float64) {
		cmd := exec.Command(file)
		cmd.Env = append(os.Environ(), env...)
		out, err := cmd.Output()
		if err == nil {
			_, err = fmt.Sscan(string(out), &roundTrip)
		}
		if err != nil {
			b.Fatal(err)
		}
		return roundTrip
	}
	ways := [...]struct {
		name, file string
		env        []string
	}{{"plain", "./plain", nil}, {"again", "./plain", nil}, {"off", "./built", []string{"SAN_PROVIDERS=none"}}, {"on", "./built", nil}}
	var ratios, more [len(ways)][]float64 // compared with plain, by round
	for b.Loop() {
		var trip [len(ways)]float64
		for _, i := range rand.Perm(len(ways)) {
			trip[i] = measure(ways[i].file, ways[i].env...)
		}
		for i := range ways {
			ratios[i] = append(ratios[i], trip[i]/trip[0])
			more[i] = append(more[i], trip[i]-trip[0])
		}
	}
	for i, way := range ways[1:] {
		b.ReportMetric(median(ratios[i+1]), way.name+"/plain")
		b.ReportMetric(median(more[i+1]), way.name+"-ns")
	}
}

func median(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/2]
}
