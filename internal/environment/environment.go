// Package environment reads the environment variables that operators set.
package environment

import (
	"fmt"
	"log"
	"maps"
	"math"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/sanconn/san/internal/trace"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// Values are the values of the variables.
type Values struct {
	Providers  []string // providers that may be used, in order: SAN_PROVIDERS, or all
	Disable    session.Feature
	MoveAtOnce bool   // SAN_MOVE=now
	ShmDir     string // SAN_SHM_DIR
	Trace      *trace.Log
	tracePath  string // SAN_TRACE

	// Of verbs:
	Subnets      []netip.Prefix // the peers that may be served; nil: all
	SharedDomain bool
	IWARPOffset  int // 0: the default, as for all numbers
	WithoutCM    bool
	TrafficClass uint8
	ServiceLevel uint8
	AckTimeout   uint8
	arena        int // MiB of regcache.DefaultArena

	Err error // about the first value that is not understood
}

// Read reads the environment, in which providers may be named, and applies what holds for all
// connections: it sets regcache.DefaultArena's limit and opens the trace.
func Read(providers []string) *Values {
	e := parse(os.LookupEnv, providers)
	if e.arena > 0 {
		regcache.SetArenaLimit(int64(e.arena) << 20)
	}
	if e.tracePath != "" {
		var err error
		if e.Trace, err = trace.Open(e.tracePath); err != nil {
			log.Printf("san: no trace by SAN_TRACE: %v", err)
		}
	}
	return &e
}

func parse(lookup func(string) (string, bool), providers []string) Values {
	v := variables{lookup: lookup}
	return Values{
		Providers:    v.providers(providers),
		Disable:      v.features(),
		MoveAtOnce:   v.word("SAN_MOVE", "now") == "now",
		ShmDir:       v.text("SAN_SHM_DIR"),
		tracePath:    v.text("SAN_TRACE"),
		Subnets:      v.subnets(),
		SharedDomain: v.word("SAN_SHARED_DOMAIN", "on", "off") == "on",
		IWARPOffset:  v.offset(),
		WithoutCM:    v.word("SAN_RDMACM", "on", "off") == "off",
		TrafficClass: uint8(v.number("SAN_TRAFFIC_CLASS", 0, math.MaxUint8)),
		ServiceLevel: uint8(v.number("SAN_SERVICE_LEVEL", 0, 15)),
		AckTimeout:   uint8(v.number("SAN_ACK_TIMEOUT", 0, 31)),
		arena:        v.number("SAN_ARENA", 1, 1<<20),
		Err:          v.err,
	}
}

// variables looks variables up, and keeps the error about the first one that is not understood.
type variables struct {
	lookup func(string) (string, bool)
	err    error
}

func (v *variables) bad(format string, args ...any) {
	if v.err == nil {
		v.err = fmt.Errorf("san: "+format, args...)
	}
}

func (v *variables) text(name string) string {
	s, _ := v.lookup(name)
	return strings.TrimSpace(s)
}

func (v *variables) providers(known []string) (names []string) {
	if v.text("SAN_PROVIDERS") == "" {
		return known
	}
	for _, word := range v.words("SAN_PROVIDERS") {
		switch {
		case word == "none":
		case slices.Contains(known, word):
			names = append(names, word)
		default:
			v.bad("unknown provider %q in SAN_PROVIDERS; known are %s and none", word, strings.Join(known, ", "))
		}
	}
	return names
}

func (v *variables) features() (all session.Feature) {
	for _, word := range v.words("SAN_DISABLE") {
		f, ok := session.FeatureNames[word]
		if !ok {
			v.bad("unknown mechanism %q in SAN_DISABLE; known are %s",
				word, strings.Join(slices.Sorted(maps.Keys(session.FeatureNames)), ", "))
		}
		all |= f
	}
	return all
}

func (v *variables) subnets() (list []netip.Prefix) {
	for _, word := range v.words("SAN_SUBNETS") {
		p, err := netip.ParsePrefix(word)
		if err != nil {
			v.bad("%q in SAN_SUBNETS is not a subnet such as 10.8.0.0/16 or fd08::/64", word)
		}
		list = append(list, p)
	}
	return list
}

// word returns a variable's value, which must be one of known, or "" if it is not set.
func (v *variables) word(name string, known ...string) string {
	s := v.text(name)
	word := strings.ToLower(s)
	if word != "" && !slices.Contains(known, word) {
		v.bad("%s=%s is not %s", name, s, strings.Join(known, " or "))
	}
	return word
}

// offset returns SAN_IWARP_OFFSET, or 0, the default, if it is not set. A value of 0 is an error.
func (v *variables) offset() int {
	n := v.number("SAN_IWARP_OFFSET", -math.MaxUint16, math.MaxUint16)
	if n == 0 && v.text("SAN_IWARP_OFFSET") != "" {
		v.bad("SAN_IWARP_OFFSET=0: no iWARP is -1")
	}
	return n
}

// number returns a variable's value, or 0, which means the default, if it is not set.
func (v *variables) number(name string, least, most int) int {
	s := v.text(name)
	if s == "" {
		return 0
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < least || n > most {
		v.bad("%s=%s is not a number from %d to %d", name, s, least, most)
	}
	return n
}

// words returns the items of a comma-separated list, without empty ones.
func (v *variables) words(name string) (words []string) {
	for w := range strings.SplitSeq(v.text(name), ",") {
		if w = strings.ToLower(strings.TrimSpace(w)); w != "" {
			words = append(words, w)
		}
	}
	return words
}
