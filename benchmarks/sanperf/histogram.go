package main

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// Each power of two is cut into 1<<subBits buckets, so that a percentile is
// within 1 % of the truth.
const (
	subBits = 6
	buckets = (64-subBits-1)<<subBits + 2<<subBits
)

// A histogram counts durations. One goroutine adds; others may read meanwhile.
type histogram struct {
	count [buckets]atomic.Int64
}

func bucketOf(d time.Duration) int {
	v := uint64(max(d, 0))
	shift := max(bits.Len64(v)-subBits-1, 0)
	return shift<<subBits + int(v>>shift)
}

// middle returns the duration that stands for all in a bucket.
func middle(bucket int) time.Duration {
	shift := max(bucket>>subBits-1, 0)
	low := uint64(bucket-shift<<subBits) << shift
	return time.Duration(low + (uint64(1)<<shift)/2)
}

func (h *histogram) add(d time.Duration) { h.count[bucketOf(d)].Add(1) }

// A distribution is the content of histograms at some moment, or the difference of two.
type distribution struct {
	count [buckets]int64
	total int64
}

// addAll adds the present content of h.
func (d *distribution) addAll(h *histogram) {
	for i := range h.count {
		n := h.count[i].Load()
		d.count[i] += n
		d.total += n
	}
}

// since returns what was added after earlier was taken.
func (d *distribution) since(earlier *distribution) *distribution {
	diff := *d
	for i, n := range earlier.count {
		diff.count[i] -= n
	}
	diff.total -= earlier.total
	return &diff
}

// quantile returns the duration that a fraction q of all does not exceed, 0 if there are
// none.
func (d *distribution) quantile(q float64) time.Duration {
	rank := max(int64(q*float64(d.total)+0.5), 1)
	for i, n := range d.count {
		if rank -= n; rank <= 0 {
			return middle(i)
		}
	}
	return 0
}

// percentiles are round trip times in microseconds.
type percentiles struct {
	Count int64   `json:"count"`
	P50   float64 `json:"p50_us"`
	P90   float64 `json:"p90_us"`
	P99   float64 `json:"p99_us"`
	P999  float64 `json:"p99.9_us"`
	Max   float64 `json:"max_us"`
}

func (d *distribution) percentiles() *percentiles {
	us := func(q float64) float64 { return float64(d.quantile(q)) / float64(time.Microsecond) }
	return &percentiles{d.total, us(0.5), us(0.9), us(0.99), us(0.999), us(1)}
}
