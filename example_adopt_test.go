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
	"time"

	"github.com/sanconn/san"
)

// A server that systemd has started with a socket (descriptor 3). It ends when its successor, which has
// the same socket, has started.
func ExampleListenConfig_Adopt() {
	inherited, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		log.Fatal(err)
	}
	l, err := new(san.ListenConfig).Adopt(inherited.(*net.TCPListener))
	if err != nil {
		log.Fatal(err)
	}
	go func() {
		terminate := make(chan os.Signal, 1)
		signal.Notify(terminate, syscall.SIGTERM)
		<-terminate
		l.Close() // from now on connections go to the successor
	}()
	server := new(http.Server)
	if err := server.Serve(l); !errors.Is(err, net.ErrClosed) {
		log.Fatal(err)
	}
	// First, all connections that had come are accepted. Shutdown drops those whose requests are not
	// read yet.
	time.Sleep(time.Second)
	if err := server.Shutdown(context.Background()); err != nil {
		log.Fatal(err)
	}
}
