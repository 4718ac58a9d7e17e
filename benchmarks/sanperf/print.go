package main

import (
	"encoding/json"
	"fmt"
	"io"
)

// MarshalText makes a target look in JSON as on the command line.
func (t target) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

var doing = map[mode]string{
	modeSend:    "sending",
	modeReceive: "receiving",
	modeBoth:    "both ways at once",
	modePing:    "round trips",
}

func printStart(w io.Writer, t target, s spec, provider, fallback string) {
	streams := ""
	if s.Streams > 1 {
		streams = fmt.Sprintf(", %d connections", s.Streams)
	}
	fmt.Fprintf(w, "%v by %s: %s, %v messages%s\n", t, provider, doing[s.Mode], byteSize(s.Size), streams)
	if fallback != "" && t.transport == "san" {
		fmt.Fprintf(w, "no SAN: %s\n", fallback)
	}
}

func printInterval(w io.Writer, m mode, i interval) {
	fmt.Fprintf(w, "%6.2f-%6.2f s  %s\n", i.From, i.To, figures(m, i.SendRate, i.RecvRate, i.RoundTrip))
}

func printResult(w io.Writer, r *result) {
	fmt.Fprintf(w, "%13.2f s  %s\n", r.Here.Seconds, figures(r.Spec.Mode, r.SendRate, r.RecvRate, r.RoundTrip))
	fmt.Fprintf(w, "by %s: %s messages/s, %.3f CPU seconds per GB (client %.2f s, server %.2f s)\n",
		r.Provider, count(r.Messages), r.CPUPerGB, r.Here.CPU, r.There.CPU)
	if r.Ways.carried() {
		r.Ways.print(w)
	}
}

// figures formats rates or round trips for one line.
func figures(m mode, sending, receiving float64, rtt *percentiles) string {
	switch m {
	case modePing:
		if rtt.Count == 0 { // there are no percentiles
			return fmt.Sprintf("%9d round trips", 0)
		}
		return fmt.Sprintf("%9d round trips  p50 %s  p90 %s  p99 %s  p99.9 %s  max %s",
			rtt.Count, micros(rtt.P50), micros(rtt.P90), micros(rtt.P99), micros(rtt.P999), micros(rtt.Max))
	case modeReceive:
		return rate(receiving)
	case modeBoth:
		return fmt.Sprintf("out %s  in %s", rate(sending), rate(receiving))
	}
	return rate(sending)
}

// rate formats bytes per second; a GB is 1e9 bytes. Gigabit Ethernet still has GB/s.
func rate(perSecond float64) string {
	switch {
	case perSecond >= 1e8:
		return digits(perSecond/1e9) + " GB/s"
	case perSecond >= 1e5:
		return digits(perSecond/1e6) + " MB/s"
	}
	return digits(perSecond/1e3) + " kB/s"
}

func micros(us float64) string {
	if us >= 10_000 {
		return digits(us/1000) + " ms"
	}
	return digits(us) + " µs"
}

// count formats a large number with a suffix.
func count(n float64) string {
	switch {
	case n >= 1e6:
		return digits(n/1e6) + " M"
	case n >= 1e3:
		return digits(n/1e3) + " k"
	}
	return digits(n)
}

// digits formats x with about three significant digits.
func digits(x float64) string {
	switch {
	case x >= 100:
		return fmt.Sprintf("%.0f", x)
	case x >= 10:
		return fmt.Sprintf("%.1f", x)
	case x >= 1:
		return fmt.Sprintf("%.2f", x)
	case x < 0.1:
		return fmt.Sprintf("%.4f", x)
	}
	return fmt.Sprintf("%.3f", x)
}
