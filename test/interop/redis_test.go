package interop

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/gomodule/redigo/redis"
	goredis "github.com/redis/go-redis/v9"
	"github.com/tidwall/redcon"
)

// serveRedcon is a Redis server with a few commands.
func serveRedcon(l net.Listener) func() error {
	var mu sync.Mutex
	values := make(map[string][]byte)
	var ps redcon.PubSub
	handler := func(c redcon.Conn, cmd redcon.Command) {
		mu.Lock()
		defer mu.Unlock()
		switch strings.ToUpper(string(cmd.Args[0])) {
		case "PING":
			c.WriteString("PONG")
		case "SET":
			values[string(cmd.Args[1])] = cmd.Args[2]
			c.WriteString("OK")
		case "GET":
			if v, ok := values[string(cmd.Args[1])]; ok {
				c.WriteBulk(v)
			} else {
				c.WriteNull()
			}
		case "SUBSCRIBE":
			ps.Subscribe(c, string(cmd.Args[1]))
		case "PUBLISH":
			c.WriteInt(ps.Publish(string(cmd.Args[1]), string(cmd.Args[2])))
		default:
			c.WriteError("ERR unknown command")
		}
	}
	accept := func(redcon.Conn) bool { return true }
	return inBackground(func() error { return redcon.Serve(l, handler, accept, nil) }, l.Close, nil)
}

func useGoRedis(t *testing.T, dial dialFunc, address string) {
	options := &goredis.Options{Addr: address, Dialer: dial}
	options.DialTimeout, options.ReadTimeout, options.WriteTimeout, options.PoolTimeout = patience, patience, patience, patience
	client := goredis.NewClient(options)
	defer client.Close()
	ctx := t.Context()
	together(8, func() {
		for _, size := range []int{0, 1, 1000, amount(3<<20 + 1)} {
			in := randomBytes(size)
			key := checksum(in)
			if err := client.Set(ctx, key, in, 0).Err(); err != nil {
				t.Error(err)
			}
			out, err := client.Get(ctx, key).Bytes()
			if err != nil {
				t.Error(err)
			}
			wantBytes(t, out, in)
		}
	})

	pipeline := client.Pipeline()
	for range 1000 {
		pipeline.Set(ctx, "key", "value", 0)
	}
	if _, err := pipeline.Exec(ctx); err != nil {
		t.Error(err)
	}

	subscription := client.Subscribe(ctx, "news")
	defer subscription.Close()
	if _, err := subscription.Receive(ctx); err != nil { // waits until it is subscribed
		t.Fatal(err)
	}
	if err := client.Publish(ctx, "news", "something").Err(); err != nil {
		t.Error(err)
	}
	message, err := subscription.ReceiveMessage(ctx)
	if err != nil || message.Payload != "something" {
		t.Errorf("published: %v, %v", message, err)
	}
}

func useRedigo(t *testing.T, dial dialFunc, address string) {
	pool := &redis.Pool{
		DialContext: func(ctx context.Context) (redis.Conn, error) {
			return redis.DialContext(ctx, "tcp", address, redis.DialContextFunc(dial))
		},
	}
	defer pool.Close()
	together(8, func() {
		c := pool.Get()
		defer c.Close()
		for _, size := range []int{0, 1, 1000, amount(3<<20 + 1)} {
			in := randomBytes(size)
			key := checksum(in)
			if _, err := c.Do("SET", key, in); err != nil {
				t.Error(err)
			}
			out, err := redis.Bytes(c.Do("GET", key))
			if err != nil {
				t.Error(err)
			}
			wantBytes(t, out, in)
		}
	})
}
