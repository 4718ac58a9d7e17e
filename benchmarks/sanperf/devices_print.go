package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
)

// print writes the report for people: what works first, then why.
func (r *report) print(w io.Writer) {
	printVerdict(w, "same host ("+sharedMemory+")", r.Providers[sharedMemory])
	printLeft(w, func(w io.Writer) {
		for _, m := range r.Mechanisms {
			fmt.Fprintf(w, "  %s\t%s\t%s\n", m.Name, okOr(m.Error), m.Use)
		}
	})

	fmt.Fprintln(w)
	printVerdict(w, "other hosts ("+rdma+")", r.Providers[rdma])
	printLeft(w, func(w io.Writer) {
		fmt.Fprintf(w, "  libraries\t%s\n", okOr(r.Libraries))
		manager := okOr(r.Manager)
		if r.withoutCM() {
			manager = noManager
		}
		fmt.Fprintf(w, "  connections\t%s\n", manager)
		if r.Libraries == "" {
			fmt.Fprintf(w, "  fork\t%s\n", forkSafety[r.ForkSafe])
		}
		limit := "none"
		if l := r.Memlock.Limit; l != nil {
			limit = byteSize(*l).String()
		}
		fmt.Fprintf(w, "  memlock limit\t%s\n", limit)
		fmt.Fprintf(w, "  registrations\t%s\n", r.Memlock.Cache)
	})
	for i := range r.Devices {
		r.Devices[i].print(w)
	}

	fmt.Fprintln(w)
	if len(r.Switches) == 0 {
		fmt.Fprintf(w, "environment: none of %s is set\n", strings.Join(switches, ", "))
	}
	for _, name := range switches {
		if v, set := r.Switches[name]; set {
			fmt.Fprintf(w, "environment: %s=%s\n", name, v)
		}
	}
	if d := r.Destination; d != nil {
		fmt.Fprintln(w)
		d.print(w)
	}
}

var forkSafety = map[bool]string{
	true:  "the program's own memory may be used",
	false: "large Writes and Reads are copied, as it is not known that a fork leaves their memory to the device: that takes Linux 5.12 and rdma-core 35, and a device",
}

func printVerdict(w io.Writer, what string, f finding) {
	verdict := "no"
	if f.Works {
		verdict = "yes"
	}
	fmt.Fprintf(w, "%s: %s: %s\n", what, verdict, f.Text)
}

// printLeft left-aligns the tab-separated columns that write prints.
func printLeft(w io.Writer, write func(io.Writer)) {
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	write(tw)
	tw.Flush()
}

func okOr(problem string) string { return cmp.Or(problem, "ok") }

func (d *rdmaDevice) print(w io.Writer) {
	fmt.Fprintf(w, "\n  %s  %s  %s\n", d.Name, d.Transport, strings.Join(d.Files, " "))
	if d.Error != "" {
		fmt.Fprintf(w, "    cannot be used: %s\n", d.Error)
	}
	for _, n := range d.Netdevs {
		state := "down"
		if n.Up {
			state = "up"
		}
		addresses := strings.Join(n.Addresses, " ")
		if addresses == "" {
			addresses = "no address"
		}
		fmt.Fprintf(w, "    interface %s  %s  MTU %d  %s\n", n.Name, state, n.MTU, addresses)
	}
	if len(d.Netdevs) == 0 {
		fmt.Fprintln(w, "    no interface in this network namespace: no destination is served by it")
	}
	for _, p := range d.Ports {
		fmt.Fprintf(w, "    port %d  %s  %s  MTU %d\n", p.Num, p.State, p.LinkLayer, p.MTU)
		if p.Error != "" {
			fmt.Fprintf(w, "      %s\n", p.Error)
		}
		if len(p.Losses) > 0 {
			fmt.Fprint(w, "      lost or repeated:")
			for _, name := range slices.Sorted(maps.Keys(p.Losses)) {
				fmt.Fprintf(w, " %s %d", name, p.Losses[name])
			}
			fmt.Fprintln(w)
		}
		printLeft(w, func(w io.Writer) {
			for _, g := range p.GIDs {
				fmt.Fprintf(w, "      GID %d\t%s\t%s\t%s\n", g.Index, g.Type, cmp.Or(g.Addr, g.GID), g.Netdev)
			}
		})
	}
	if c := d.Caps; c != nil {
		fmt.Fprintf(w, "    queue pairs %d of %d requests, %d elements (%d of a read); completions %d on %d vectors\n",
			c.QueuePairs, c.Requests, c.Elements, c.ReadElements, c.Completions, c.Vectors)
		fmt.Fprintf(w, "    RDMA reads at a time %d out, %d in; memory regions %d of up to %s\n",
			c.ReadsOut, c.ReadsIn, c.Regions, largest(c.RegionBytes))
		windows := "none"
		if c.Windows > 0 && len(c.WindowTypes) > 0 {
			windows = fmt.Sprintf("%d of type %s", c.Windows, strings.Join(c.WindowTypes, ", "))
		}
		fmt.Fprintf(w, "    memory windows %s\n", windows)
	}
}

// largest formats a limit in bytes.
func largest(bytes uint64) string {
	if bytes >= 1<<47 { // all that a process can address
		return "any size"
	}
	return byteSize(bytes).String()
}

func (d *destination) print(w io.Writer) {
	switch {
	case d.Error != "":
		fmt.Fprintf(w, "%s: %s\n", d.Address, d.Error)
	case d.Gets == sharedMemory, d.Gets == rdma:
		fmt.Fprintf(w, "%s: a connection begins on TCP, and moves to %s when it is used\n", d.Address, d.Gets)
	case d.Gets == "":
		fmt.Fprintf(w, "%s: a dial gets no connection\n", d.Address)
	default:
		fmt.Fprintf(w, "%s: a connection begins on TCP, and stays there\n", d.Address)
	}
	printLeft(w, func(w io.Writer) {
		for _, o := range d.Outcomes {
			mark, said := " ", o.Error
			if o.Chosen {
				mark = "*"
			}
			switch {
			case o.Error != "":
			case o.Provider == sharedMemory, o.Provider == rdma:
				said = "moves, from " + o.Local
			default:
				said = "connects from " + o.Local
			}
			fmt.Fprintf(w, "%s %s\t%s\t%s\t%s\n", mark, o.Provider, o.Address, micros(1000*o.Millis), said)
		}
	})
}
