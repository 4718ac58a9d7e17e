package main

import (
	"fmt"
	"time"

	"github.com/sanconn/san/test/turns"
)

// A measurement makes calls to a service, by several callers at a time.
type measurement struct {
	what    string
	service string
	callers int
	// connect returns a function for each caller that makes a call, and one that closes all.
	connect func(dial dialFunc, address string, callers int) (calls []func() error, close func(), err error)
}

func (m measurement) name() string {
	if m.callers == 1 {
		return m.what + ", 1 caller"
	}
	return fmt.Sprintf("%s, %d callers", m.what, m.callers)
}

// run returns the results of each round, in the order of transports.
func (m measurement) run(at map[string]string, rounds int, length time.Duration) (all [][2]turns.Result, err error) {
	var calls [2][]func() error
	for i, tr := range transports {
		made, closeAll, err := m.connect(tr.dial, at[tr.name], m.callers)
		if err != nil {
			return nil, err
		}
		defer closeAll()
		calls[i] = made
		if _, err := turns.Load(made, length); err != nil { // makes the connections, and warms up
			return nil, err
		}
	}
	for round := range rounds {
		var r [2]turns.Result
		for i := range r {
			i := (i + round) % 2
			if r[i], err = turns.Load(calls[i], length); err != nil {
				return nil, err
			}
		}
		all = append(all, r)
	}
	return all, nil
}

// row returns a line of the table. After a median is half the distance between the quartiles. After a
// ratio, which is the median of the rounds' ratios, are their quartiles.
func row(name string, rounds [][2]turns.Result) string {
	rate := func(i int) string {
		low, median, high := turns.Quartiles(rounds, func(r [2]turns.Result) float64 { return r[i].Rate })
		return fmt.Sprintf("%s ± %.0f %%", turns.ThreeDigits(median), 50*(high-low)/median)
	}
	p99 := func(i int) string {
		_, median, _ := turns.Quartiles(rounds, func(r [2]turns.Result) float64 { return float64(r[i].P99) })
		return turns.ThreeDigits(median/1000) + " µs"
	}
	ratio := func(f func([2]turns.Result) float64) string {
		low, median, high := turns.Quartiles(rounds, f)
		return fmt.Sprintf("**%.2f** (%.2f–%.2f)", median, low, high)
	}
	return fmt.Sprintf("| %s | %s | %s | %s | %s | %s | %s |", name, rate(0), rate(1),
		ratio(func(r [2]turns.Result) float64 { return r[1].Rate / r[0].Rate }), p99(0), p99(1),
		ratio(func(r [2]turns.Result) float64 { return float64(r[0].P99) / float64(r[1].P99) }))
}
