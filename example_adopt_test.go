package san_test

import (
	"context"
	"errors"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"github.com/sanconn/san"
)

// A server that systemd has started with a socket (descriptor 3), and that ends when its
// successor, which has the same socket, is there.
func ExampleListenConfig_Adopt() {
	inherited, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		log.Fatal(err)
	}
	l, err := new(san.ListenConfig).Adopt(inherited.(*net.TCPListener))
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	server := new(http.Server)
	done := make(chan error)
	go func() {
		<-ctx.Done()
		done <- server.Shutdown(context.Background()) // calls l.Close
	}()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		log.Fatal(err)
	}
	if err := <-done; err != nil {
		log.Fatal(err)
	}
}
