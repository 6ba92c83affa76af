package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/timeline/view"
)

// jobSocket returns a listener at the place of the socket of an hvdrun.
func jobSocket(t *testing.T) (net.Listener, *jobAddress) {
	t.Helper()
	folder := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(folder, socketName))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, &jobAddress{folder, 1}
}

// After the end of a job, a signal that ends hvdrun ends the wait for open pages and for hvdrun top.
func TestSignalAfterTheJob(t *testing.T) {
	signals := make(chan os.Signal)
	ctx, stop := untilSignal(signals)
	defer stop()
	for _, s := range []os.Signal{unix.SIGUSR1, unix.SIGINT} {
		select {
		case signals <- s:
		case <-ctx.Done():
			t.Fatalf("the wait has ended before %v", s)
		}
	}
	select {
	case <-ctx.Done():
	case <-time.After(deadline):
		t.Error("SIGINT does not end the wait")
	}
}

// A connection that breaks while hvdrun runs is not the end of the job.
func TestEndAfterABrokenConnection(t *testing.T) {
	l, j := jobSocket(t)
	go func() {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		c.Close()
		handler := func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(&live.Job{End: &live.End{Status: 7}})
		}
		_ = http.Serve(l, http.HandlerFunc(handler)) // until the test ends
	}()
	if last := j.end(t.Context()); last == nil || last.End.Status != 7 {
		t.Errorf("got %+v, want the end with status 7", last)
	}
	l.Close()
	if last := j.end(t.Context()); last == nil || last.End.Status != -1 {
		t.Errorf("got %+v, want that hvdrun has ended without a last state", last)
	}
}

// In a job whose records take nearly all of the time that they may take, a pause does not make the later
// questions to the ranks rare.
func TestQuestionsAfterAPause(t *testing.T) {
	perInterval := int(0.9 * float64(viewInterval) / float64(recordTime*shareOfHost) *
		float64(runtime.GOMAXPROCS(0)))
	now := time.Now()
	next, asked, late := now, now, 0
	for i := range 100 {
		now = now.Add(viewInterval)
		if paused := i < 3; paused || now.Before(next) {
			continue
		}
		if i >= 50 && now.Sub(asked) > viewInterval {
			late++
		}
		n := perInterval * int(now.Sub(asked)/viewInterval)
		next = nextQuestion(next, now, map[int]*live.Records{0: {Entries: make([]live.Entry, n)}})
		asked = now
	}
	if late > 0 {
		t.Errorf("%d questions were late", late)
	}
}

// An hvdrun that was stopped does not stop the page.
func TestRecordsOfAStoppedHvdrun(t *testing.T) {
	_, j := jobSocket(t) // nobody accepts
	done := make(chan error, 1)
	go func() {
		_, err := j.records(t.Context(), map[int]uint64{0: 0})
		done <- err
	}()
	select {
	case err := <-done:
		if err == nil {
			t.Error("got records of an hvdrun that does not answer")
		}
	case <-time.After(deadline):
		t.Errorf("no result after %v", deadline)
	}
}

// If the operations of a rank cannot be decoded, the page says why, and the ranks are not asked for them
// again at once.
func TestPageOfRecordsOfAnotherVersion(t *testing.T) {
	listener, j := jobSocket(t)
	const states = 3
	shows, asked := make(chan struct{}), make(chan struct{}, 100)
	handler := http.NewServeMux()
	handler.HandleFunc(statesPath, func(w http.ResponseWriter, req *http.Request) {
		for range states {
			about, processes := live.About{What: live.Ranks, Size: 1}, []live.Process{{Answered: true}}
			_ = json.NewEncoder(w).Encode(&live.Job{About: about, Processes: processes})
			_ = http.NewResponseController(w).Flush()
			select {
			case <-shows:
			case <-req.Context().Done():
			}
		}
		<-req.Context().Done()
	})
	handler.HandleFunc(recordsPath, func(w http.ResponseWriter, _ *http.Request) {
		asked <- struct{}{}
		_, _ = w.Write(live.EncodeAnswers(map[int][]byte{0: {2}}))
	})
	handler.HandleFunc(endPath, func(_ http.ResponseWriter, req *http.Request) { <-req.Context().Done() })
	go func() { _ = http.Serve(listener, handler) }() // until the test ends
	l, err := newLive(&live.About{What: live.Ranks, Size: 1})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(nil)
	page := view.NewLiveServer(l, server.Listener.Addr().String())
	server.Config.Handler = page
	server.Start()
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { followJob(ctx, j, l) })
	client := testnet.Browser(t)
	get := func(url string) io.ReadCloser {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		return answer.Body
	}
	get(page.URL()).Close()
	stream := get(server.URL + "/live")
	defer stream.Close()
	shown := bufio.NewScanner(stream)
	for n := 0; n < states; { // the page misses no state, because each is sent when the one before is shown
		if !shown.Scan() {
			t.Fatalf("the page has shown %d states with the reason: %v", n, shown.Err())
		}
		if strings.Contains(shown.Text(), "malformed operations of rank 0: got version 1") {
			n++
			select {
			case shows <- struct{}{}:
			case <-ctx.Done():
				t.Fatalf("the job has sent %d states", n)
			}
		}
	}
	if len(asked) != 1 {
		t.Errorf("the ranks were asked %d times, want once", len(asked))
	}
}
