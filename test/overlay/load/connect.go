package main

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/nats-io/nats.go"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
)

// patience is how long a call may take.
const patience = 20 * time.Second

// each returns the same call for all callers.
func each(callers int, call func() error) (calls []func() error) {
	for range callers {
		calls = append(calls, call)
	}
	return calls
}

// keeping returns a client that keeps a connection for each caller.
func keeping(callers int) *http.Client {
	return &http.Client{Timeout: patience, Transport: &http.Transport{
		MaxIdleConnsPerHost: callers,
		MaxConnsPerHost:     callers, // otherwise it may dial more connections than it then uses
		DisableCompression:  true,
	}}
}

// answered reads an answer, which must not be empty.
func answered(r *http.Response, err error) error {
	if err != nil {
		return err
	}
	defer r.Body.Close()
	n, err := io.Copy(io.Discard, r.Body)
	if err == nil && (r.StatusCode != http.StatusOK || n == 0) {
		err = fmt.Errorf("%s: %s, %d bytes", r.Request.URL, r.Status, n)
	}
	return err
}

// connectHTTP gets a URL over kept connections.
func connectHTTP(url string, callers int) ([]func() error, error) {
	client := keeping(callers)
	return each(callers, func() error { return answered(client.Get(url)) }), nil
}

// connectEtcdPut puts a value of 1 KiB, and connectEtcdGet gets it, by etcd's client.
func connectEtcdPut(address string, callers int) ([]func() error, error) {
	c, err := clientv3.NewFromURL("http://" + address)
	if err != nil {
		return nil, err
	}
	value := strings.Repeat("0123456789abcdef", 64)
	return each(callers, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := c.Put(ctx, "key", value)
		return err
	}), nil
}

func connectEtcdGet(address string, callers int) ([]func() error, error) {
	put, err := connectEtcdPut(address, 1)
	if err == nil {
		err = put[0]()
	}
	if err != nil {
		return nil, err
	}
	c, err := clientv3.NewFromURL("http://" + address)
	if err != nil {
		return nil, err
	}
	return each(callers, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		r, err := c.Get(ctx, "key")
		if err == nil && (len(r.Kvs) != 1 || len(r.Kvs[0].Value) != 1<<10) {
			err = fmt.Errorf("got %v", r.Kvs)
		}
		return err
	}), nil
}

// connectNATSRequest makes requests of 1 KiB, which another connection of this process answers.
func connectNATSRequest(address string, callers int) ([]func() error, error) {
	answers, err := nats.Connect(address)
	if err != nil {
		return nil, err
	}
	if _, err = answers.Subscribe("echo", func(m *nats.Msg) { m.Respond(m.Data) }); err != nil {
		return nil, err
	}
	if err = answers.Flush(); err != nil {
		return nil, err
	}
	asks, err := nats.Connect(address)
	if err != nil {
		return nil, err
	}
	sent := bytes.Repeat([]byte("0123456789abcdef"), 64)
	return each(callers, func() error {
		m, err := asks.Request("echo", sent, patience)
		if err == nil && !bytes.Equal(m.Data, sent) {
			err = fmt.Errorf("another answer: %q", m.Data)
		}
		return err
	}), nil
}

// publishings is how many messages are one call of connectNATSPublish.
const publishings = 200

// connectNATSPublish publishes messages of 128 bytes, and waits until they come on another connection.
// Each caller has two connections.
func connectNATSPublish(address string, callers int) (calls []func() error, err error) {
	message := make([]byte, 128)
	for i := range callers {
		from, err := nats.Connect(address)
		if err != nil {
			return nil, err
		}
		to, err := nats.Connect(address)
		if err != nil {
			return nil, err
		}
		subject := fmt.Sprint("subject.", i)
		var came atomic.Int64
		all := make(chan struct{}, 1)
		if _, err = to.Subscribe(subject, func(*nats.Msg) {
			if came.Add(1)%publishings == 0 {
				all <- struct{}{}
			}
		}); err != nil {
			return nil, err
		}
		if err = to.Flush(); err != nil {
			return nil, err
		}
		calls = append(calls, func() error {
			for range publishings {
				if err := from.Publish(subject, message); err != nil {
					return err
				}
			}
			select {
			case <-all:
				return nil
			case <-time.After(patience):
				return fmt.Errorf("%d messages have come", came.Load())
			}
		})
	}
	return calls, nil
}

// connectGRPC makes health checks on one connection.
func connectGRPC(address string, callers int) ([]func() error, error) {
	c, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	client := grpc_health_v1.NewHealthClient(c)
	return each(callers, func() error {
		_, err := client.Check(context.Background(), &grpc_health_v1.HealthCheckRequest{})
		return err
	}), nil
}

// connectPostgres selects 100 rows of 100 bytes, each caller on its own connection.
func connectPostgres(address string, callers int) ([]func() error, error) {
	db, err := sql.Open("pgx", "postgres://user@"+address+"/test?sslmode=disable&default_query_exec_mode=simple_protocol")
	if err != nil {
		return nil, err
	}
	db.SetMaxIdleConns(callers)
	db.SetMaxOpenConns(callers)
	return each(callers, func() error { return selectRows(db) }), nil
}

func selectRows(db *sql.DB) error {
	rows, err := db.Query("SELECT id, value FROM rows")
	if err != nil {
		return err
	}
	defer rows.Close()
	n := 0
	for ; rows.Next(); n++ {
		var id int
		var value string
		if err := rows.Scan(&id, &value); err != nil {
			return err
		}
		if value != fmt.Sprintf("%0100d", id) {
			return fmt.Errorf("row %d is %q", id, value)
		}
	}
	if err := rows.Err(); err != nil || n != 100 {
		return fmt.Errorf("%d rows: %w", n, err)
	}
	return nil
}
