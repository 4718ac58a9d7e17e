package san

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

// Calls of TestAsTCPDoes that copy from and to files and sockets, or that use the descriptor of File.

// diffPair returns a pair of connected sockets, neither of which is a Conn.
func diffPair(network string) (a, b net.Conn, err error) {
	address := "127.0.0.1:0"
	if network == "unix" {
		dir, err := os.MkdirTemp("", "diff")
		if err != nil {
			return nil, nil, err
		}
		defer os.RemoveAll(dir)
		address = filepath.Join(dir, "s")
	}
	l, err := net.Listen(network, address)
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	if a, err = net.Dial(network, l.Addr().String()); err != nil {
		return nil, nil, err
	}
	if b, err = l.Accept(); err != nil {
		a.Close()
	}
	return a, b, err
}

// network returns the network of the call's socket, or "" if the call uses a file.
func (c diffCall) network() string {
	switch c.what {
	case "FromTCP", "ToTCP":
		return "tcp"
	case "FromUnix", "ToUnix":
		return "unix"
	}
	return ""
}

// copyFrom writes by ReadFrom from a file or a socket.
func (e *diffEnd) copyFrom(call diffCall) string {
	if !e.expired {
		e.SetWriteDeadline(time.Now().Add(diffPatience))
	}
	b, cut := e.out.next(call.size, 1)
	src, err := diffSource(call.network(), b)
	if err != nil {
		return err.Error()
	}
	defer src.Close()
	n, err := e.Conn.(io.ReaderFrom).ReadFrom(src)
	cut(int(n))
	return fmt.Sprintf("%d, %s", n, diffCause(err))
}

// diffSource returns a file or a socket from which b can be read.
func diffSource(network string, b []byte) (io.ReadCloser, error) {
	if network == "" {
		f, err := diffFile()
		if err != nil {
			return nil, err
		}
		_, werr := f.Write(b)
		_, serr := f.Seek(0, io.SeekStart)
		return f, cmp.Or(werr, serr)
	}
	src, feed, err := diffPair(network)
	switch {
	case err != nil:
	case len(b) == 0: // with an expired deadline a copy on TCP waits for the source's end, and a Conn finds an end that has come
		err = feed.Close()
	default:
		go func() {
			feed.Write(b) // this fails if the copy has failed
			feed.Close()
		}()
	}
	return src, err
}

// diffFile returns a file without a name.
func diffFile() (*os.File, error) {
	f, err := os.CreateTemp("", "diff")
	if err == nil {
		err = os.Remove(f.Name())
	}
	return f, err
}

// copyTo reads as writeTo does, into a file or a socket.
func (e *diffEnd) copyTo(call diffCall, due int) string {
	sink, err := diffSinkOf(call.network())
	if err != nil {
		return err.Error()
	}
	if !e.expired {
		e.SetReadDeadline(time.Now().Add(diffPatience))
	}
	var waiting sync.WaitGroup
	if due >= 0 && !e.expired { // after the due bytes nothing may come: less time
		waiting.Go(func() {
			_ = testenv.Await(diffPatience, func() error { // if it fails, WriteTo's result shows that
				if n := sink.came(); n < int64(due) {
					return fmt.Errorf("%d of %d bytes have come", n, due)
				}
				return nil
			})
			e.SetReadDeadline(time.Now().Add(diffNothing))
		})
	}
	n, err := e.Conn.(io.WriterTo).WriteTo(sink.w)
	b := sink.close()
	waiting.Wait()
	if wrong := e.in.wrong(b, e.read); wrong != "" {
		return wrong
	}
	if e.read += len(b); int(n) != len(b) {
		return fmt.Sprintf("%d, of which %d have come", n, len(b))
	}
	return fmt.Sprintf("%d, %s", n, diffCause(err))
}

// diffSink is a file or a socket into which a copy goes.
type diffSink struct {
	w     io.Writer
	came  func() int64  // returns how many bytes have come
	close func() []byte // closes the sink, and returns all bytes that have come
}

func diffSinkOf(network string) (s diffSink, err error) {
	if network == "" {
		f, err := diffFile()
		if err != nil {
			return s, err
		}
		var mu sync.Mutex // guards closed
		var closed int64 = -1
		size := func() int64 {
			mu.Lock()
			defer mu.Unlock()
			if closed >= 0 {
				return closed
			}
			info, _ := f.Stat()
			return info.Size()
		}
		return diffSink{f, size, func() []byte {
			b := make([]byte, size())
			f.ReadAt(b, 0)
			mu.Lock()
			defer mu.Unlock()
			closed = int64(len(b))
			f.Close()
			return b
		}}, nil
	}
	to, from, err := diffPair(network)
	if err != nil {
		return s, err
	}
	var n atomic.Int64
	all := make(chan []byte, 1)
	go func() {
		defer from.Close()
		var b []byte
		for p := make([]byte, 64<<10); ; {
			k, err := from.Read(p)
			b = append(b, p[:k]...)
			n.Add(int64(k))
			if err != nil {
				all <- b
				return
			}
		}
	}()
	return diffSink{to, n.Load, func() []byte { to.Close(); return <-all }}, nil
}

// writeFile does what Write does, on the descriptor of File.
func (e *diffEnd) writeFile(size int) string {
	f, err := e.Conn.(diffTCP).File()
	if err != nil {
		return diffError(err)
	}
	defer f.Close()
	f.SetWriteDeadline(time.Now().Add(diffPatience))
	b, cut := e.out.next(size, 1)
	n, err := f.Write(b)
	cut(n)
	return fmt.Sprintf("%d, %s", n, diffCause(err))
}

// readFile reads as readAll does, on the descriptor of File.
func (e *diffEnd) readFile(size, due int) string {
	f, err := e.Conn.(diffTCP).File()
	if err != nil {
		return diffError(err)
	}
	defer f.Close()
	was := e.expired
	e.expired = true // readAll must set no deadline, as f has its own
	defer func() { e.expired = was }()
	n := 0
	return e.readAll(size, due, func(b []byte) (int, error) {
		patience := diffPatience
		if due >= 0 && n >= due {
			patience = diffNothing
		}
		f.SetReadDeadline(time.Now().Add(patience))
		k, err := f.Read(b)
		n += k
		if err != nil && err != io.EOF {
			err = errors.New(diffCause(err))
		}
		return k, err
	})
}

// diffCause formats the cause of an error, because copies wrap it in others.
func diffCause(err error) string {
	var errno syscall.Errno
	switch {
	case err == nil, err == io.EOF:
		return fmt.Sprint(err)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return os.ErrDeadlineExceeded.Error()
	case errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrClosed):
		return net.ErrClosed.Error()
	case errors.As(err, &errno):
		return errno.Error()
	}
	return fmt.Sprintf("%v (%T)", err, err)
}
