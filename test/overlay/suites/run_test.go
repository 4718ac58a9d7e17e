package main

import (
	"slices"
	"testing"
)

// TestExceptions: tests that pass only with go are found, and distinguished from known exceptions.
func TestExceptions(t *testing.T) {
	run := func(lines string) results {
		r, err := parse([]byte(lines))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	plain := run(`{"Action":"pass","Package":"p","Test":"A"}
{"Action":"pass","Package":"p","Test":"A/one"}
{"Action":"pass","Package":"p","Test":"A/127.0.0.1:4242"}
{"Action":"pass","Package":"p","Test":"B"}
{"Action":"pass","Package":"p","Test":"C"}
{"Action":"pass","Package":"p","Test":"E"}
{"Action":"pass","Package":"p","Test":"E"}
{"Action":"fail","Package":"p","Test":"D"}
{"Action":"fail","Package":"p"}`)
	moved := run(`{"Action":"fail","Package":"p","Test":"A"}
{"Action":"fail","Package":"p","Test":"A/one"}
{"Action":"skip","Package":"p","Test":"B"}
{"Action":"fail","Package":"p","Test":"E"}
{"Action":"pass","Package":"p","Test":"E"}
{"Action":"output","Package":"p","Test":"` + countTest + `","Output":"carried by {\"shm\":2,\"tcp\":3}\n"}
{"Action":"pass","Package":"p","Test":"` + countTest + `"}
{"Action":"fail","Package":"p","Test":"D"}`)
	if plain.passed() != 6 || moved.passed() != 0 || moved.dialed["shm"] != 2 {
		t.Errorf("%d and %d passed, %v", plain.passed(), moved.passed(), moved.dialed)
	}
	var names []string
	for _, missing := range plain.without(moved) {
		names = append(names, missing.name)
	}
	slices.Sort(names)
	if want := []string{"A/one", "B", "C", "E"}; !slices.Equal(names, want) { // C did not run, because of a crash; E failed in one of two files
		t.Errorf("only with go: %q, want %q", names, want)
	}
	s := suite{except: map[string]string{"A": "a reason", "B": "another"}}
	if s.known(comparison{onlyPlain: names}) || !s.known(comparison{onlyPlain: names[:2]}) {
		t.Error("C is known, or A/one and B are not")
	}
}
