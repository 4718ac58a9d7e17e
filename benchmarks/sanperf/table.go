package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// A comparison is the main job's table.
type comparison struct {
	OS      string      `json:"os"`
	Arch    string      `json:"arch"`
	Go      string      `json:"go"`
	CPUs    int         `json:"cpus"`
	Rounds  int         `json:"rounds"`
	Seconds float64     `json:"seconds_per_measurement"`
	Read    int         `json:"read"` // bytes that each Read has room for
	Rows    []*tableRow `json:"rows"`

	Simulated string    `json:"simulated,omitempty"` // the settings of the simulated device, if it is one
	Ways      []*wayRow `json:"ways,omitempty"`      // of the SAN, by workload
}

// A wayRow tells how one workload's bytes went in all rounds.
type wayRow struct {
	of   workload
	Name string `json:"name"`
	ways
}

type tableRow struct {
	figure
	Name   string  `json:"name"`
	Unit   string  `json:"unit"`
	Better string  `json:"better"` // "lower" or "higher"
	Cells  []*cell `json:"cells"`  // the first one is the reference
}

// A cell is one figure of one contender over all rounds.
type cell struct {
	Contender string    `json:"contender"`
	Providers []string  `json:"providers"` // what carried the contender: usually one provider
	Fallbacks []string  `json:"fallbacks,omitempty"`
	Values    []float64 `json:"values"` // by round
	summary
	Ratio summary `json:"times_better"` // compared with the first contender in the same round
}

// A summary summarizes many values.
type summary struct {
	Median float64 `json:"median"`
	Spread float64 `json:"spread"` // half the distance between the quartiles
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

func summarize(values []float64) summary {
	s := slices.Sorted(slices.Values(values))
	return summary{
		Median: quantile(s, 0.5),
		Spread: (quantile(s, 0.75) - quantile(s, 0.25)) / 2,
		Min:    quantile(s, 0),
		Max:    quantile(s, 1),
	}
}

// quantile interpolates between sorted values; it is 0 if there are none.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i+1 == len(sorted) {
		return sorted[i]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}

// add adds a measurement to each row that uses it.
func (c *comparison) add(contender string, w workload, r *result) {
	for _, row := range c.Rows {
		if row.of != w {
			continue
		}
		for _, cell := range row.Cells {
			if cell.Contender == contender {
				cell.Values = append(cell.Values, row.value(r))
				cell.Providers = addNew(cell.Providers, r.Provider)
				if r.Fallback != "" && r.Target.transport == "san" {
					cell.Fallbacks = addNew(cell.Fallbacks, r.Fallback)
				}
			}
		}
	}
}

// addWays adds to the workload's row how the bytes went that package san carried.
func (c *comparison) addWays(w workload, went ways) {
	if !went.carried() {
		return
	}
	for _, row := range c.Ways {
		if row.of == w {
			row.add(went)
			return
		}
	}
	name := doing[w.mode] + ", " + byteSize(w.size).String()
	c.Ways = append(c.Ways, &wayRow{of: w, Name: name, ways: went})
}

// printWays writes a row for each workload, and a line of all.
func (c *comparison) printWays(out io.Writer) {
	if len(c.Ways) == 0 {
		return
	}
	lines := [][]string{append(append([]string{"how the SAN's bytes went"}, waysOfBytes...), waysTook...)}
	var all ways
	for _, row := range c.Ways {
		all.add(row.ways)
		lines = append(lines, append([]string{row.Name}, row.cells()...))
	}
	fmt.Fprintln(out)
	printColumns(out, lines)
	all.print(out)
}

func addNew(list []string, s string) []string {
	if slices.Contains(list, s) {
		return list
	}
	return append(list, s)
}

// conclude summarizes the rounds. Ratios are computed within each round, because the machine's speed
// changes from one round to the next.
func (c *comparison) conclude() {
	for _, row := range c.Rows {
		base := row.Cells[0].Values
		for _, cell := range row.Cells {
			cell.summary = summarize(cell.Values)
			var ratios []float64
			for i := range min(len(base), len(cell.Values)) {
				better, than := cell.Values[i], base[i]
				if row.lower {
					better, than = than, better
				}
				if than > 0 {
					ratios = append(ratios, better/than)
				}
			}
			cell.Ratio = summarize(ratios)
		}
	}
}

// print writes the table: one row per figure and one column per contender; for the last contender also
// its ratio, and what carried it.
func (c *comparison) print(w io.Writer) {
	if c.Simulated != "" {
		fmt.Fprintf(w, simulatedBanner, c.Simulated)
	}
	fmt.Fprintf(w, "two processes, %s/%s, %d CPUs, %s; medians of %d interleaved rounds of %v s each, %v reads\n\n",
		c.OS, c.Arch, c.CPUs, c.Go, c.Rounds, c.Seconds, byteSize(c.Read))
	header := []string{""}
	for _, cell := range c.Rows[0].Cells {
		header = append(header, cell.Contender)
	}
	last := len(c.Rows[0].Cells) - 1
	header = append(header, c.Rows[0].Cells[last].Contender+" : "+c.Rows[0].Cells[0].Contender, "(range)", "went by")
	lines := [][]string{header}
	for _, row := range c.Rows {
		line := []string{row.Name}
		for _, cell := range row.Cells {
			line = append(line, fmt.Sprintf("%s ±%2.0f%%", row.format(cell.Median), percent(cell.Spread, cell.Median)))
		}
		ratio := row.Cells[last].Ratio
		var by []string
		for _, cell := range row.Cells {
			by = append(by, strings.Join(cell.Providers, "+"))
		}
		lines = append(lines, append(line,
			digits(ratio.Median)+"×", digits(ratio.Min)+"–"+digits(ratio.Max), strings.Join(by, ", ")))
	}
	printColumns(w, lines)
	fmt.Fprintf(w, "\n±: half the distance of the quartiles; ×: how many times better, within each round. A GB is 1e9 bytes.\n")
	var fallbacks []string
	for _, row := range c.Rows {
		for _, reason := range row.Cells[last].Fallbacks {
			fallbacks = addNew(fallbacks, reason)
		}
	}
	if len(fallbacks) > 0 {
		fmt.Fprintf(w, "The SAN column was TCP at times or always: %s\n", strings.Join(fallbacks, "; "))
	}
	c.printWays(w)
}

func percent(part, whole float64) float64 {
	if whole == 0 {
		return 0
	}
	return 100 * part / whole
}

// printColumns aligns the first and the last column to the left and the
// others to the right.
func printColumns(w io.Writer, lines [][]string) {
	width := make([]int, len(lines[0]))
	for _, line := range lines {
		for i, text := range line {
			width[i] = max(width[i], utf8.RuneCountInString(text))
		}
	}
	for _, line := range lines {
		var b strings.Builder
		for i, text := range line {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(text))
			switch i {
			case 0:
				b.WriteString(text + pad)
			case len(line) - 1:
				b.WriteString("   " + text)
			default:
				b.WriteString("   " + pad + text)
			}
		}
		fmt.Fprintln(w, b.String())
	}
}
