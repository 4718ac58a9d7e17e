package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"
)

// A measurement is calls to a service, so many at a time.
type measurement struct {
	what    string
	service string
	callers int
	// connect returns a function for each caller that makes a call, and what closes all.
	connect func(dial dialFunc, address string, callers int) (calls []func() error, close func(), err error)
}

func (m measurement) name() string {
	if m.callers == 1 {
		return m.what + ", 1 caller"
	}
	return fmt.Sprintf("%s, %d callers", m.what, m.callers)
}

// result is of a transport in a round.
type result struct {
	rate float64       // calls a second
	p99  time.Duration // of a call
}

// run returns the results of each round, in the order of transports.
func (m measurement) run(at map[string]string, rounds int, length time.Duration) (all [][2]result, err error) {
	var calls [2][]func() error
	for i, tr := range transports {
		made, closeAll, err := m.connect(tr.dial, at[tr.name], m.callers)
		if err != nil {
			return nil, err
		}
		defer closeAll()
		calls[i] = made
		if _, err := load(made, length); err != nil { // connects, and warms up
			return nil, err
		}
	}
	for round := range rounds {
		var r [2]result
		for i := range r {
			i := (i + round) % 2
			if r[i], err = load(calls[i], length); err != nil {
				return nil, err
			}
		}
		all = append(all, r)
	}
	return all, nil
}

// load makes calls for some time, one after the other by each caller.
func load(calls []func() error, length time.Duration) (result, error) {
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
			return result{}, err
		}
	}
	sorted := slices.Concat(times...)
	slices.Sort(sorted)
	return result{
		rate: float64(len(sorted)) / took.Seconds(),
		p99:  sorted[len(sorted)*99/100],
	}, nil
}

// row is a line of the table. Behind a median is half the distance between the quartiles;
// behind a ratio, which is the median of the rounds' ratios, are the quartiles.
func row(name string, rounds [][2]result) string {
	rate := func(i int) string {
		low, median, high := quartiles(rounds, func(r [2]result) float64 { return r[i].rate })
		return fmt.Sprintf("%s ± %.0f %%", threeDigits(median), 50*(high-low)/median)
	}
	p99 := func(i int) string {
		_, median, _ := quartiles(rounds, func(r [2]result) float64 { return float64(r[i].p99) })
		return threeDigits(median/1000) + " µs"
	}
	ratio := func(f func([2]result) float64) string {
		low, median, high := quartiles(rounds, f)
		return fmt.Sprintf("**%.2f** (%.2f–%.2f)", median, low, high)
	}
	return fmt.Sprintf("| %s | %s | %s | %s | %s | %s | %s |", name, rate(0), rate(1),
		ratio(func(r [2]result) float64 { return r[1].rate / r[0].rate }), p99(0), p99(1),
		ratio(func(r [2]result) float64 { return float64(r[0].p99) / float64(r[1].p99) }))
}

func quartiles[T any](all []T, value func(T) float64) (low, median, high float64) {
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

// threeDigits writes numbers as a reader of tables wants them: 12,300, 45.6.
func threeDigits(v float64) string {
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
