// Compare compares programs built by the command san with the same programs built by go. Both ends are
// built in the same way, and run in processes of their own, which take turns. It prints a table.
//
//	go run ./compare [-rounds 15] [-time 300ms] [-only REGEXP] [-control]
//
// In each round the one is measured, and then the other, in an order that changes with each round.
// Figures are medians of the rounds. With -control both are built by go: then the differences come from
// the machine. It has to be run in test/overlay.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"time"

	"github.com/sanconn/san/test/overlay/internal/build"
)

// ways are the commands by which programs are built. With -control both are go.
var ways = [2]string{"go", "san"}

func main() {
	log.SetFlags(0)
	rounds := flag.Int("rounds", 15, "`rounds` of each measurement")
	length := flag.Duration("time", 300*time.Millisecond, "`time` of a program in a round")
	only := flag.String("only", "", "measure what matches `regexp`")
	control := flag.Bool("control", false, "measure what go builds twice")
	flag.Parse()
	if *control {
		ways[1] = "go"
	}
	chosen, err := regexp.Compile(*only)
	if err != nil {
		log.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "compare")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := compare(dir, chosen, *rounds, *length); err != nil {
		os.RemoveAll(dir)
		log.Fatal(err)
	}
}

func compare(dir string, chosen *regexp.Regexp, rounds int, length time.Duration) error {
	b := builder{dir: dir, files: make(map[string]string)}
	if err := build.San(filepath.Join(dir, "san")); err != nil {
		return err
	}
	fmt.Printf("%s, %d processors, %d rounds of %v\n\n", runtime.Version(), runtime.NumCPU(), rounds, length)
	fmt.Println("| | plain, a second | built by san | san : plain | p99, plain | p99, san | plain : san | carried by |")
	fmt.Println("|---|---|---|---|---|---|---|---|")
	for _, m := range measurements {
		if !chosen.MatchString(m.name()) {
			continue
		}
		line, err := m.run(&b, rounds, length)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name(), err)
		}
		fmt.Println(line)
	}
	return nil
}
