package interop

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/sanconn/san"
)

// sizes are the sizes of values that are stored in a database and read back.
var sizes = []int{0, 1, 1000, 100_000, 4<<20 + 1}

func usePGX(t *testing.T, dial dialFunc, address string) {
	config := must(pgxpool.ParseConfig("postgres://postgres@" + address + "/postgres?sslmode=disable"))
	config.ConnConfig.DialFunc = dial
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()

	together(4, func() {
		for _, size := range sizes {
			in := randomBytes(size)
			var out []byte
			var sum string
			err := pool.QueryRow(t.Context(), "select $1::bytea, encode(sha256($1::bytea), 'hex')", in).Scan(&out, &sum)
			if err != nil {
				t.Error(err)
				return
			}
			wantBytes(t, out, in)
			if sum != checksum(in) {
				t.Errorf("the server's checksum is %s, want %s", sum, checksum(in))
			}
		}
	})
	useCopyFrom(t, pool)

	// A context that ends interrupts the query: the driver sets a deadline on the connection, and makes
	// a second connection to cancel the query.
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := pool.Exec(ctx, "select pg_sleep(600)"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a query that is interrupted: %v", err)
	}
}

// useCopyFrom sends many rows by the binary protocol.
func useCopyFrom(t *testing.T, pool *pgxpool.Pool) {
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	if _, err := tx.Exec(t.Context(), "create temporary table rows (n int, data bytea) on commit drop"); err != nil {
		t.Fatal(err)
	}
	const rows = 20_000
	data := randomBytes(100 + rows)
	n, err := tx.CopyFrom(t.Context(), pgx.Identifier{"rows"}, []string{"n", "data"},
		pgx.CopyFromSlice(rows, func(i int) ([]any, error) { return []any{i, data[i : i+100]}, nil }))
	if err != nil || n != rows {
		t.Fatalf("%d rows copied: %v", n, err)
	}
	got, err := tx.Query(t.Context(), "select n, data from rows order by n")
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	for i := range rows {
		var n int
		var b []byte
		if !got.Next() {
			t.Fatalf("only %d rows: %v", i, got.Err())
		}
		if err := got.Scan(&n, &b); err != nil || n != i {
			t.Fatalf("row %d is %d: %v", i, n, err)
		}
		wantBytes(t, b, data[i:i+100])
	}
}

func useMySQL(t *testing.T, dial dialFunc, address string) {
	config := mysql.NewConfig()
	config.Net, config.Addr, config.User = "tcp", address, "root"
	config.DialFunc = dial
	connector, err := mysql.NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(connector)
	defer db.Close()

	together(4, func() {
		for _, size := range sizes {
			in := randomBytes(size)
			var out []byte
			var sum string
			if err := db.QueryRowContext(t.Context(), "select ?, sha2(?, 256)", in, in).Scan(&out, &sum); err != nil {
				t.Error(err)
				return
			}
			wantBytes(t, out, in)
			if sum != checksum(in) {
				t.Errorf("the server's checksum is %s, want %s", sum, checksum(in))
			}
		}
	})

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := db.ExecContext(ctx, "do sleep(600)"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a query that is interrupted: %v", err)
	}
}

// If the same programs connect to the servers themselves, which do not use the library, they use TCP.
func TestDatabasesByTCP(t *testing.T) {
	for _, tt := range []struct {
		backend *backend
		use     func(*testing.T, dialFunc, string)
	}{{postgres, usePGX}, {mariadb, useMySQL}} {
		t.Run(tt.backend.name, func(t *testing.T) {
			tt.backend.start(t)
			var dialed record
			tt.use(t, dialed.dialer(new(san.Dialer).DialContext), tt.backend.address)
			wantCarriers(t, "dialed", dialed.carriers(), byTCP(san.ReasonUnused))
		})
	}
}
