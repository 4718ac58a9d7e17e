package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"
)

const (
	fileName = "file"
	fileSize = 64 << 20
)

// serveFiles serves a directory by HTTP until standard input ends.
func serveFiles(o options, dir string) error {
	l, err := o.listen()
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	server := &http.Server{Handler: http.FileServer(http.Dir(dir))}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	_, err = io.Copy(io.Discard, os.Stdin)
	server.Close()
	<-served
	return err
}

// fetch returns the rate, in GB/s, at which one connection fetches the file repeatedly.
func fetch(ctx context.Context, o options, address string) (float64, error) {
	client := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) { return o.dial(ctx, address) },
	}}
	defer client.CloseIdleConnections()
	for count := 1; ; count *= 2 { // the first, shorter loops warm up
		start := time.Now()
		for range count {
			if err := get(ctx, client, "http://"+address+"/"+fileName); err != nil {
				return 0, err
			}
		}
		if took := time.Since(start); took >= measured {
			return float64(count) * fileSize / took.Seconds() / 1e9, nil
		}
	}
}

func get(ctx context.Context, client *http.Client, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if n, err := io.Copy(io.Discard, answer.Body); err != nil || n != fileSize {
		return fmt.Errorf("%d bytes came: %w", n, err)
	}
	return nil
}
