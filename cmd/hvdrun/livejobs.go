package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/rundir"
)

const (
	// aboutTime is how long hvdrun may take to say which job it is.
	aboutTime = time.Second
	// maxStateBytes is the maximum length of a state, which has about 1 KB for each rank.
	maxStateBytes = 64 << 20
	// retryPause is the time after which a reader whose connection has ended connects again.
	retryPause = 500 * time.Millisecond
)

// jobAddress is the address of the job of an hvdrun of this user.
type jobAddress struct {
	folder string
	pid    int // of hvdrun
}

// runningJobs returns the jobs of this user on this host, by the number of hvdrun's process.
func runningJobs(xdg string) (jobs []jobAddress, err error) {
	folders, err := rundir.Folders(xdg)
	if err != nil {
		return nil, err
	}
	for _, folder := range folders {
		conn, err := dialJob(context.Background(), folder)
		if err != nil {
			continue // the folder of a rank, or of an hvdrun that has just ended
		}
		pid, err := peerOf(conn)
		if err = errors.Join(err, conn.Close()); err == nil {
			jobs = append(jobs, jobAddress{folder, pid})
		}
	}
	slices.SortFunc(jobs, func(a, b jobAddress) int { return cmp.Compare(a.pid, b.pid) })
	return jobs, nil
}

func dialJob(ctx context.Context, folder string) (net.Conn, error) {
	at, release, err := shortPath(folder)
	if err != nil {
		return nil, err
	}
	defer release()
	return new(net.Dialer).DialContext(ctx, "unix", at)
}

// peerOf returns the number of the process that listens at the other end of a Unix connection. The kernel
// knows it even if the process does not accept the connection, for example because it was stopped.
func peerOf(conn net.Conn) (pid int, err error) {
	c, ok := conn.(*net.UnixConn)
	if !ok {
		return 0, fmt.Errorf("got a connection of type %T, want a Unix connection", conn)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || failed != nil {
		return 0, errors.Join(err, failed)
	}
	return int(cred.Pid), nil
}

// get returns a resource of the job.
func (a *jobAddress) get(ctx context.Context, resource string) (io.ReadCloser, error) {
	return a.send(ctx, http.MethodGet, resource, nil)
}

// send sends a request to the job and returns its response.
func (a *jobAddress) send(ctx context.Context, method, resource string, content io.Reader) (io.ReadCloser,
	error) {
	transport := &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialJob(ctx, a.folder)
		}}
	req, err := http.NewRequestWithContext(ctx, method, "http://job"+resource, content)
	if err != nil {
		return nil, err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return nil, errors.Join(fmt.Errorf("hvdrun (process %d) refused: %s", a.pid, text), err)
	}
	return resp.Body, nil
}

// fetch returns what decode makes of the response of the job to a request.
func fetch[T any](ctx context.Context, a *jobAddress, resource string, decode func([]byte) (T, error)) (v T,
	err error) {
	body, err := a.get(ctx, resource)
	if err != nil {
		return v, err
	}
	defer body.Close()
	text, err := io.ReadAll(io.LimitReader(body, maxStateBytes))
	if err != nil {
		return v, err
	}
	return decode(text)
}

// about asks hvdrun which job it is.
func (a *jobAddress) about() (*live.About, error) {
	ctx, cancel := context.WithTimeout(context.Background(), aboutTime)
	defer cancel()
	return fetch(ctx, a, aboutPath, live.DecodeAbout)
}

// end waits until the job has ended, and returns its last state, or one that says that hvdrun has ended
// without it. If the connection breaks, it connects again. If ctx ends, it returns nil.
func (a *jobAddress) end(ctx context.Context) *live.Job {
	for {
		last, err := fetch(ctx, a, endPath, live.DecodeJob)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			return last
		case a.gone(ctx):
			return &live.Job{Time: time.Now(), End: a.lost()}
		}
		pause(ctx)
	}
}

// gone reports whether hvdrun has ended.
func (a *jobAddress) gone(ctx context.Context) bool {
	conn, err := dialJob(ctx, a.folder)
	if err == nil {
		_ = conn.Close() // nothing was sent
	}
	return err != nil && ctx.Err() == nil
}

// pause waits for retryPause, or until ctx ends.
func pause(ctx context.Context) {
	select {
	case <-time.After(retryPause):
	case <-ctx.Done():
	}
}

// records returns what ranks have recorded since the entries with the given numbers. It returns within a
// limited time, also if hvdrun was stopped.
func (a *jobAddress) records(ctx context.Context, from map[int]uint64) (map[int]*live.Records, error) {
	query := make(url.Values)
	for rank, number := range from {
		query.Add(rankParameter, fmt.Sprintf("%d:%d", rank, number))
	}
	ctx, cancel := context.WithTimeout(ctx, lookTime+aboutTime)
	defer cancel()
	return fetch(ctx, a, recordsPath+"?"+query.Encode(), live.DecodeRecords)
}

// update is what a reader of a job receives: a state, or a sentence if no state arrives.
type update struct {
	job  *live.Job
	text []byte // job as JSON in one line; nil if hvdrun has not sent it
	note string
}

// follow passes the states of a job to the function show until the job has ended, show returns false or ctx
// ends. If the connection breaks, it connects again. If hvdrun has ended without a last state, for example
// because it was killed, follow makes one that says so, with the status -1.
func (a *jobAddress) follow(ctx context.Context, every time.Duration, show func(update) bool) {
	ctx, cancel := context.WithCancel(ctx)
	states := make(chan update)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(states)
		a.read(ctx, every, states)
	}()
	defer func() {
		cancel()
		<-done
	}()
	late := every + lookTime + aboutTime
	for since := time.Now(); ; {
		select {
		case u, open := <-states:
			if !open || !show(u) || u.job != nil && u.job.End != nil {
				return
			}
			since, late = time.Now(), every+lookTime+aboutTime
		case <-time.After(late):
			if !show(update{note: fmt.Sprintf("hvdrun (process %d) has not answered for %d s. It may have been stopped.",
				a.pid, int(time.Since(since).Seconds()))}) {
				return
			}
			late = aboutTime
		}
	}
}

// read sends the states of a job to the channel.
func (a *jobAddress) read(ctx context.Context, every time.Duration, updates chan<- update) {
	send := func(u update) {
		select {
		case updates <- u:
		case <-ctx.Done():
		}
	}
	var last live.About
	for {
		ended := false
		err := a.readOnce(ctx, every, func(u update) {
			last, ended = u.job.About, u.job.End != nil
			send(u)
		})
		if ended || ctx.Err() != nil {
			return
		}
		if a.gone(ctx) {
			send(update{job: &live.Job{About: last, Time: time.Now(), End: a.lost()}})
			return
		}
		send(update{note: fmt.Sprintf("The connection to hvdrun (process %d) has ended: %v. Trying again.",
			a.pid, err)})
		pause(ctx)
	}
}

// lost returns the end of a job whose hvdrun has ended without a last state.
func (a *jobAddress) lost() *live.End {
	return &live.End{Status: -1, Text: fmt.Sprintf("hvdrun (process %d) has ended and has not said how the job "+
		"has ended: it may have been killed", a.pid)}
}

// readOnce passes the states from one connection to handle, until the connection ends. It returns the reason.
func (a *jobAddress) readOnce(ctx context.Context, every time.Duration, handle func(update)) error {
	body, err := a.get(ctx, fmt.Sprintf("%s?%s=%d", statesPath, everyParameter, every.Milliseconds()))
	if err != nil {
		return err
	}
	defer body.Close()
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, maxStateBytes)
	for lines.Scan() {
		j, err := live.DecodeJob(lines.Bytes())
		if err != nil {
			return err
		}
		handle(update{job: j, text: slices.Clone(lines.Bytes())})
	}
	return cmp.Or(lines.Err(), io.EOF)
}
