package main

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/sanproxy"
)

// statsTimeout bounds one request for the counters.
const statsTimeout = 10 * time.Second

// report is what -stats serves.
type report struct {
	Routes []routeReport `json:"routes"`
	SAN    sanReport     `json:"san"`
}

type routeReport struct {
	Listen string `json:"listen"`
	To     string `json:"to"`
	sanproxy.Stats
}

// sanReport has the counters of san.Stats. By provider, each connection counts under "tcp", with which
// it begins, and again under the provider to which it has moved. By reason, it counts connections that
// have not moved.
type sanReport struct {
	Dialed    map[string]uint64 `json:"dialed"`
	Accepted  map[string]uint64 `json:"accepted"`
	Open      map[string]int    `json:"open"`
	Fallbacks map[string]uint64 `json:"fallbacks"`
	Listeners map[string]uint64 `json:"listeners"`
	Refused   uint64            `json:"refused"`
}

func newReport(forwarders []*forwarder) report {
	s := san.Stats()
	r := report{SAN: sanReport{s.Dialed, s.Accepted, s.Open, byName(s.Fallbacks), byName(s.Listeners), s.Refused}}
	for _, f := range forwarders {
		r.Routes = append(r.Routes, routeReport{f.listen.String(), f.to.String(), f.proxy.Stats()})
	}
	return r
}

func byName(counts map[san.Reason]uint64) map[string]uint64 {
	named := make(map[string]uint64, len(counts))
	for reason, n := range counts {
		named[reason.String()] = n
	}
	return named
}

// serveStats serves the counters until stop, which waits for the server's end.
func serveStats(ctx context.Context, s *settings, forwarders []*forwarder) (stop func(), err error) {
	l, err := s.open(ctx, *s.stats)
	if err != nil {
		return nil, err
	}
	server := &http.Server{
		ReadTimeout: statsTimeout, WriteTimeout: statsTimeout,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			e := json.NewEncoder(w)
			e.SetIndent("", "  ")
			e.Encode(newReport(forwarders))
		}),
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		server.Serve(l) // returns at Close
	}()
	return func() {
		server.Close()
		<-ended
	}, nil
}
