package main

import (
	"bytes"
	"fmt"
	"math"
	"time"
)

func printTable(name string, points []point) {
	fmt.Printf("%s\n\n", name)
	fmt.Println("| connections | connect | memory of one | idle, all | round trip alone: p50, p99 | one in 100 active: p50, p99 | processor time of such a round trip |")
	fmt.Println("|---|---|---|---|---|---|---|")
	for _, p := range points {
		fmt.Printf("| %d | %s | %.0f KiB | %.2f %% | %s, %s | %s, %s | %s |\n", p.connections, micros(p.connect),
			float64(p.memory)/1024, 100*p.idle, micros(p.alone.p50), micros(p.alone.p99),
			micros(p.active.p50), micros(p.active.p99), micros(p.activeCPU))
	}
	fmt.Println()
}

func micros(d time.Duration) string {
	us := float64(d) / 1000
	if us >= 100 {
		return fmt.Sprintf("%.0f µs", us)
	}
	return fmt.Sprintf("%.3g µs", us)
}

// charts are the values of a point that are drawn, with their units.
var charts = []struct {
	title string
	value func(point) float64
}{
	{"round trip alone, p50, µs", func(p point) float64 { return float64(p.alone.p50) / 1000 }},
	{"round trip, one in 100 active, p50, µs", func(p point) float64 { return float64(p.active.p50) / 1000 }},
	{"round trip, one in 100 active, p99, µs", func(p point) float64 { return float64(p.active.p99) / 1000 }},
	{"memory of a connection, both ends, KiB", func(p point) float64 { return float64(p.memory) / 1024 }},
	{"processors used when all idle, %", func(p point) float64 { return 100 * p.idle }},
	{"connect and a round trip, µs", func(p point) float64 { return float64(p.connect) / 1000 }},
}

const (
	chartWidth, chartHeight = 300, 180
	margin                  = 45
	perRow                  = 3
)

var colors = map[string]string{"shm": "#c33", "tcp": "#36c"}

// drawing is an SVG with a chart for each value, by the number of connections, both on
// logarithmic axes.
func drawing(curves map[string][]point) []byte {
	var b bytes.Buffer
	rows := (len(charts) + perRow - 1) / perRow
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n",
		perRow*(chartWidth+margin), rows*(chartHeight+2*margin))
	fmt.Fprintln(&b, `<rect width="100%" height="100%" fill="white"/>`)
	for i, chart := range charts {
		fmt.Fprintf(&b, `<g transform="translate(%d,%d)">`+"\n",
			i%perRow*(chartWidth+margin)+margin, i/perRow*(chartHeight+2*margin)+margin)
		draw(&b, chart.title, chart.value, curves)
		fmt.Fprintln(&b, `</g>`)
	}
	fmt.Fprintln(&b, `</svg>`)
	return b.Bytes()
}

func draw(b *bytes.Buffer, title string, value func(point) float64, curves map[string][]point) {
	const least = 0.01 // smaller values are drawn as this
	low, high, most := math.Inf(1), math.Inf(-1), 1
	for _, points := range curves {
		for _, p := range points {
			low, high = min(low, max(least, value(p))), max(high, value(p), least)
			most = max(most, p.connections)
		}
	}
	bottom, top := math.Floor(math.Log10(low)), math.Ceil(math.Log10(high)+1e-9)
	if top <= bottom {
		top = bottom + 1
	}
	width := max(1, math.Log10(float64(most)))
	x := func(n float64) float64 { return math.Log10(n) / width * chartWidth * 0.9 }
	y := func(v float64) float64 {
		return chartHeight * (top - math.Log10(max(least, v))) / (top - bottom)
	}
	fmt.Fprintf(b, `<text y="-12" font-weight="bold">%s</text>`+"\n", title)
	for e := bottom; e <= top; e++ {
		at := y(math.Pow(10, e))
		fmt.Fprintf(b, `<path d="M0 %.1fH%d" stroke="#ddd"/><text x="-5" y="%.1f" text-anchor="end">%g</text>`+"\n",
			at, chartWidth*9/10, at+4, math.Pow(10, e))
	}
	for n := 1; n <= most; n *= 10 {
		fmt.Fprintf(b, `<text x="%.1f" y="%d" text-anchor="middle">%d</text>`+"\n", x(float64(n)), chartHeight+16, n)
	}
	for _, tr := range transports {
		points := curves[tr.name]
		fmt.Fprintf(b, `<path fill="none" stroke="%s" stroke-width="2" d="`, colors[tr.name])
		for i, p := range points {
			fmt.Fprintf(b, "%c%.1f %.1f", "ML"[min(i, 1)], x(float64(p.connections)), y(value(p)))
		}
		last := points[len(points)-1]
		fmt.Fprintf(b, `"/><text x="%.1f" y="%.1f" fill="%s">%s</text>`+"\n",
			x(float64(last.connections))+4, y(value(last))+4, colors[tr.name], tr.name)
	}
}
