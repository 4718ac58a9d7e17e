// Postgres is a server of PostgreSQL's protocol, by pgx's own package for servers. It has one table of
// 100 rows, which it returns for each query.
package main

import (
	"errors"
	"expvar"
	"fmt"
	"io"
	"log"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgtype"
)

// main prints the address, and then the counters for each line of standard input.
func main() {
	log.SetFlags(0)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				log.Fatal(err)
			}
			go func() {
				defer c.Close()
				if err := serve(pgproto3.NewBackend(c, c)); err != nil && !errors.Is(err, io.EOF) {
					log.Print(err)
				}
			}()
		}
	}()
	fmt.Println(l.Addr())
	for {
		if _, err := fmt.Scanln(); err != nil {
			return
		}
		fmt.Println(expvar.Get("sanbuild"))
	}
}

// serve answers queries until the client ends.
func serve(b *pgproto3.Backend) error {
	if _, err := b.ReceiveStartupMessage(); err != nil {
		return err
	}
	b.Send(&pgproto3.AuthenticationOk{})
	// pgx makes simple queries only if it has got these two.
	b.Send(&pgproto3.ParameterStatus{Name: "standard_conforming_strings", Value: "on"})
	b.Send(&pgproto3.ParameterStatus{Name: "client_encoding", Value: "UTF8"})
	for {
		b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
		if err := b.Flush(); err != nil {
			return err
		}
		m, err := b.Receive()
		if err != nil {
			return err
		}
		switch m := m.(type) {
		case *pgproto3.Query:
			answer(b, m.String)
		case *pgproto3.Terminate:
			return nil
		default:
			return fmt.Errorf("message of type %T", m)
		}
	}
}

func answer(b *pgproto3.Backend, query string) {
	if strings.HasPrefix(query, "--") { // a ping
		b.Send(&pgproto3.EmptyQueryResponse{})
		return
	}
	b.Send(&pgproto3.RowDescription{Fields: []pgproto3.FieldDescription{
		{Name: []byte("id"), DataTypeOID: pgtype.Int4OID, DataTypeSize: 4, TypeModifier: -1},
		{Name: []byte("value"), DataTypeOID: pgtype.TextOID, DataTypeSize: -1, TypeModifier: -1},
	}})
	for id := range 100 {
		b.Send(&pgproto3.DataRow{Values: [][]byte{fmt.Append(nil, id), fmt.Appendf(nil, "%0100d", id)}})
	}
	b.Send(&pgproto3.CommandComplete{CommandTag: []byte("SELECT 100")})
}
