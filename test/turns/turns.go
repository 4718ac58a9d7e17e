// Package turns measures calls of two sides that take turns, for tables of their ratios. It is a module
// of its own without dependencies, because what it measures must not depend on the library in some
// cases.
package turns

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"
)

// Result is about the calls of one turn.
type Result struct {
	Calls int
	Rate  float64       // calls a second
	P99   time.Duration // of one call
}

// Load makes calls for some time. Each caller makes one call after the other.
func Load(calls []func() error, length time.Duration) (Result, error) {
	times := make([][]time.Duration, len(calls))
	errs := make([]error, len(calls))
	var all sync.WaitGroup
	start := time.Now()
	for i, call := range calls {
		all.Go(func() {
			for last := start; last.Sub(start) < length; {
				if errs[i] = call(); errs[i] != nil {
					return
				}
				now := time.Now()
				times[i] = append(times[i], now.Sub(last))
				last = now
			}
		})
	}
	all.Wait()
	took := time.Since(start)
	for _, err := range errs {
		if err != nil {
			return Result{}, err
		}
	}
	sorted := slices.Concat(times...)
	slices.Sort(sorted)
	return Result{
		Calls: len(sorted),
		Rate:  float64(len(sorted)) / took.Seconds(),
		P99:   sorted[len(sorted)*99/100],
	}, nil
}

// Quartiles returns the quartiles and the median of a value of all elements.
func Quartiles[T any](all []T, value func(T) float64) (low, median, high float64) {
	values := make([]float64, len(all))
	for i, v := range all {
		values[i] = value(v)
	}
	slices.SortFunc(values, cmp.Compare)
	at := func(part float64) float64 {
		i := part * float64(len(values)-1)
		below := values[int(i)]
		return below + (i-math.Floor(i))*(values[int(math.Ceil(i))]-below)
	}
	return at(0.25), at(0.5), at(0.75)
}

// ThreeDigits formats a number for a table, with three significant digits: 12,300, 45.6.
func ThreeDigits(v float64) string {
	if v <= 0 {
		return "0"
	}
	digits := math.Pow(10, math.Floor(math.Log10(v))-2)
	v = math.Round(v/digits) * digits
	if v < 1000 {
		return fmt.Sprintf("%.*f", max(0, int(-math.Log10(digits))), v)
	}
	s := fmt.Sprintf("%.0f", v)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
