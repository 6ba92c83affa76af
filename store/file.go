package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/outfile"
	"github.com/gohvd/gohvd/store/internal/call"
)

// FileStore is a Store in a file, for processes that share a file system but have no network between them.
// Processes that use PyTorch's FileStore can share the file.
//
// The file is a log of records. A record has a key and a value, each preceded by its length. The value of a
// key is the value in the last record of the key. Each call locks the file (flock). A waiting call reads the
// file every 10 ms. The last process of the job removes the file. If an earlier job has left its file behind,
// the user must remove it, or the new job finds the keys of the earlier job.
//
// If a process dies in the middle of a write, the next process that writes repairs the file. Only the user
// that has created the file can read and write it, unless it existed before with another mode.
type FileStore struct {
	path   string
	size   int // number of processes of the job; 0 if the file is never removed
	closed chan struct{}

	// A goroutine that holds the lock of the file may wait for mu. A goroutine that holds mu must not wait
	// for the lock of the file, because another process may be paused while it holds that lock.
	mu     sync.Mutex
	values map[string][]byte // contents of the file, by the keys in the file
	read   int64             // number of bytes of the file that have been read into values
	file   os.FileInfo       // the file that values were read from
}

var _ Store = (*FileStore)(nil)

// In the file, each key of a user is preceded by userPrefix. A record whose key begins with deletedPrefix
// deletes the key that follows this prefix. The value of openKey is the number of stores that are open, and
// the value of closedKey is the number of stores that have been closed. PyTorch before 2.0 uses only
// closedKey.
const (
	userPrefix    = "/"
	deletedPrefix = "-"
	openKey       = "refcount/"
	closedKey     = "cleanup/"
)

const (
	// filePeriod is the interval at which a waiting call reads the file, the same as in PyTorch. Waiting
	// calls poll because NFS has no notifications.
	filePeriod = 10 * time.Millisecond
	// closeTime is how long Close waits for the lock of the file.
	closeTime = 5 * time.Second
)

// NewFileStore opens the store in the file at path, and creates the file if it does not exist. size is the
// number of processes of the job. When that many processes have closed their stores and no store is open, the
// file is removed. A size of 0 means that the file is never removed.
func NewFileStore(ctx context.Context, path string, size int) (*FileStore, error) {
	s := &FileStore{path: path, size: size, closed: make(chan struct{}), values: make(map[string][]byte)}
	if _, err := s.count(ctx, openKey, 1); err != nil {
		return nil, fmt.Errorf("store: open %s: %w", path, err)
	}
	return s, nil
}

// Path returns the path of the file.
func (s *FileStore) Path() string { return s.path }

// Set implements Store.
func (s *FileStore) Set(ctx context.Context, key string, value []byte) error {
	return s.failed("set", key, s.multiSet(ctx, []string{key}, [][]byte{value}))
}

// MultiSet implements Store.
func (s *FileStore) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	return s.failed("multi-set", first(keys), s.multiSet(ctx, keys, values))
}

func (s *FileStore) multiSet(ctx context.Context, keys []string, values [][]byte) error {
	if err := call.CheckPairs(keys, values); err != nil {
		return err
	}
	return s.change(ctx, func() (log []byte, err error) {
		for i, k := range keys {
			log = appendRecord(log, userPrefix+k, values[i])
		}
		return log, nil
	})
}

// Get implements Store.
func (s *FileStore) Get(ctx context.Context, key string) (value []byte, err error) {
	values, err := s.multiGet(ctx, []string{key})
	if err != nil {
		return nil, s.failed("get", key, err)
	}
	return values[0], nil
}

// MultiGet implements Store.
func (s *FileStore) MultiGet(ctx context.Context, keys ...string) ([][]byte, error) {
	values, err := s.multiGet(ctx, keys)
	return values, s.failed("multi-get", first(keys), err)
}

func (s *FileStore) multiGet(ctx context.Context, keys []string) ([][]byte, error) {
	if err := call.CheckKeys(keys); err != nil {
		return nil, err
	}
	values := make([][]byte, len(keys))
	err := s.poll(ctx, func() bool {
		for i, k := range keys {
			v, ok := s.values[userPrefix+k]
			if !ok {
				return false
			}
			values[i] = clone(v)
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	return values, nil
}

// TryGet implements Store.
func (s *FileStore) TryGet(ctx context.Context, key string) (value []byte, ok bool, err error) {
	if err = call.CheckKey(key); err == nil {
		err = s.look(ctx, func() {
			value, ok = s.values[userPrefix+key]
			value = clone(value)
		})
	}
	return value, ok, s.failed("try-get", key, err)
}

// Watch implements Store.
func (s *FileStore) Watch(ctx context.Context, key string, prev []byte) (value []byte, err error) {
	if err := call.CheckKey(key); err != nil {
		return nil, s.failed("watch", key, err)
	}
	err = s.poll(ctx, func() bool {
		v, ok := s.values[userPrefix+key]
		value = clone(v)
		return ok && (prev == nil || !bytes.Equal(v, prev))
	})
	if err != nil {
		return nil, s.failed("watch", key, err)
	}
	return value, nil
}

// Wait implements Store.
func (s *FileStore) Wait(ctx context.Context, keys ...string) error {
	if err := call.CheckKeys(keys); err != nil {
		return s.failed("wait", first(keys), err)
	}
	return s.failed("wait", first(keys), s.poll(ctx, func() bool { return s.has(keys) }))
}

// Check implements Store.
func (s *FileStore) Check(ctx context.Context, keys ...string) (ok bool, err error) {
	if err := call.CheckKeys(keys); err != nil {
		return false, s.failed("check", first(keys), err)
	}
	err = s.look(ctx, func() { ok = s.has(keys) })
	return ok, s.failed("check", first(keys), err)
}

func (s *FileStore) has(keys []string) bool {
	for _, k := range keys {
		if _, ok := s.values[userPrefix+k]; !ok {
			return false
		}
	}
	return true
}

// NumKeys implements Store. It also counts the keys openKey and closedKey.
func (s *FileStore) NumKeys(ctx context.Context) (n int64, err error) {
	err = s.look(ctx, func() { n = int64(len(s.values)) })
	return n, s.failed("number of keys", "", err)
}

// Add implements Store.
func (s *FileStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	if err := call.CheckKey(key); err != nil {
		return 0, s.failed("add", key, err)
	}
	sum, err := s.count(ctx, userPrefix+key, delta)
	return sum, s.failed("add", key, err)
}

func (s *FileStore) count(ctx context.Context, key string, delta int64) (sum int64, err error) {
	err = s.change(ctx, func() ([]byte, error) {
		old, ok := s.values[key]
		var err error
		if sum, err = sumOf(old, ok, delta); err != nil {
			return nil, err
		}
		return appendRecord(nil, key, strconv.AppendInt(nil, sum, 10)), nil
	})
	if err != nil {
		return 0, err
	}
	return sum, nil
}

// CompareAndSet implements Store.
func (s *FileStore) CompareAndSet(ctx context.Context, key string, expected,
	desired []byte) (actual []byte, swapped bool, err error) {
	err = errors.Join(call.CheckKey(key), call.CheckValue(desired))
	if err == nil {
		err = s.change(ctx, func() ([]byte, error) {
			old, ok := s.values[userPrefix+key]
			if ok != (expected != nil) || !bytes.Equal(old, expected) {
				actual = clone(old)
				return nil, nil
			}
			actual, swapped = append([]byte{}, desired...), true
			return appendRecord(nil, userPrefix+key, desired), nil
		})
	}
	if err != nil {
		return nil, false, s.failed("compare-and-set", key, err)
	}
	return actual, swapped, nil
}

// Append implements Store.
func (s *FileStore) Append(ctx context.Context, key string, value []byte) error {
	if err := call.CheckKey(key); err != nil {
		return s.failed("append", key, err)
	}
	return s.failed("append", key, s.change(ctx, func() ([]byte, error) {
		whole := append(clone(s.values[userPrefix+key]), value...)
		return appendRecord(nil, userPrefix+key, whole), call.CheckValue(whole)
	}))
}

// Delete implements Store.
func (s *FileStore) Delete(ctx context.Context, key string) (existed bool, err error) {
	if err := call.CheckKey(key); err != nil {
		return false, s.failed("delete", key, err)
	}
	err = s.change(ctx, func() ([]byte, error) {
		if _, existed = s.values[userPrefix+key]; !existed {
			return nil, nil
		}
		return appendRecord(nil, deletedPrefix+userPrefix+key, nil), nil
	})
	return existed && err == nil, s.failed("delete", key, err)
}

// Push implements Store. It returns ErrUnsupported.
func (s *FileStore) Push(_ context.Context, key string, _ []byte) error {
	return s.failed("push", key, ErrUnsupported)
}

// Pop implements Store. It returns ErrUnsupported.
func (s *FileStore) Pop(_ context.Context, key string) ([]byte, error) {
	return nil, s.failed("pop", key, ErrUnsupported)
}

// TryPop implements Store. It returns ErrUnsupported.
func (s *FileStore) TryPop(_ context.Context, key string) ([]byte, bool, error) {
	return nil, false, s.failed("try-pop", key, ErrUnsupported)
}

// QueueLen implements Store. It returns ErrUnsupported.
func (s *FileStore) QueueLen(_ context.Context, key string) (int64, error) {
	return 0, s.failed("queue length", key, ErrUnsupported)
}

// Close implements Store. If this is the last store of the job that is closed, Close removes the file.
func (s *FileStore) Close() error {
	s.mu.Lock()
	done := ended(s.closed)
	if !done {
		close(s.closed)
	}
	s.mu.Unlock()
	if done {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	err := s.withFile(ctx, nil, os.O_RDWR, unix.LOCK_EX, func(f *os.File) error {
		var counts [2]int64
		for i, c := range []struct {
			key   string
			delta int64
		}{{openKey, -1}, {closedKey, 1}} {
			old, ok := s.values[c.key]
			var err error
			if counts[i], err = sumOf(old, ok, c.delta); err != nil {
				return fmt.Errorf("malformed counter %q in the file: %w", c.key, err)
			}
			if err := s.write(f,
				appendRecord(nil, c.key, strconv.AppendInt(nil, counts[i], 10))); err != nil {
				return err
			}
		}
		if s.size > 0 && counts[0] <= 0 && counts[1] >= int64(s.size) {
			return os.Remove(s.path)
		}
		return nil
	})
	// Another process may have removed the file, which is not an error.
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("store: close %s: %w", s.path, err)
	}
	return nil
}

func (s *FileStore) failed(op, key string, err error) error {
	if err == nil {
		return nil
	}
	return call.Error(op, key, s.path, err)
}

// poll reads the file repeatedly until the function cond returns true. cond may read s.values.
func (s *FileStore) poll(ctx context.Context, cond func() bool) error {
	ticker := time.NewTicker(filePeriod)
	defer ticker.Stop()
	for {
		met := false
		if err := s.look(ctx, func() { met = cond() }); err != nil || met {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		case <-s.closed:
			return ErrClosed
		}
	}
}

// look reads the file and then calls f, which may read s.values.
func (s *FileStore) look(ctx context.Context, f func()) error {
	err := s.withFile(ctx, s.closed, os.O_RDONLY, unix.LOCK_SH, func(*os.File) error {
		f()
		return nil
	})
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// The file does not exist, because the job has ended or a user has removed the file.
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget()
	f()
	return nil
}

// change reads the file, calls f, and appends the records that f returns to the file. f may read s.values.
func (s *FileStore) change(ctx context.Context, f func() ([]byte, error)) error {
	return s.withFile(ctx, s.closed, os.O_RDWR|os.O_CREATE, unix.LOCK_EX, func(file *os.File) error {
		log, err := f()
		if err != nil || len(log) == 0 {
			return err
		}
		return s.write(file, log)
	})
}

// withFile opens and locks the file, locks s.mu, reads the new records of the file, and calls f. It returns
// an error if ctx ends, and ErrClosed if the channel in the parameter closed is closed. Close itself passes a
// nil channel.
func (s *FileStore) withFile(ctx context.Context, closed <-chan struct{}, flags, lock int,
	f func(*os.File) error) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		file, err := s.open(closed, flags)
		if err != nil {
			return err
		}
		gone, err := s.withLock(ctx, closed, file, lock, f)
		if err := errors.Join(err, file.Close()); err != nil || !gone {
			return err
		}
	}
}

// open opens the file while it holds s.mu, so that no call creates the file again after Close has removed it.
func (s *FileStore) open(closed <-chan struct{}, flags int) (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ended(closed) {
		return nil, ErrClosed
	}
	path, err := outfile.Resolve(s.path)
	if err != nil {
		return nil, err
	}
	// With O_NONBLOCK, the call does not wait for a writer of a FIFO.
	file, err := os.OpenFile(path, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s has the mode %v, want a regular file", path, info.Mode())
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// withLock implements withFile after the file was opened. It reports whether the file was removed before it
// could be locked.
func (s *FileStore) withLock(ctx context.Context, closed <-chan struct{}, file *os.File, lock int,
	f func(*os.File) error) (gone bool, err error) {
	if err := flock(ctx, closed, file, lock); err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if ended(closed) {
		return false, ErrClosed
	}
	opened, err := file.Stat()
	if err != nil {
		return false, err
	}
	if now, err := os.Stat(s.path); err != nil || !os.SameFile(now, opened) {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
		return true, nil
	}
	if s.file == nil || !os.SameFile(s.file, opened) || opened.Size() < s.read {
		s.forget()
	}
	s.file = opened
	if err := s.readOn(file, opened.Size()); err != nil {
		return false, err
	}
	return false, f(file)
}

// flock acquires a lock on the file. It polls, because a blocking flock cannot be cancelled.
func flock(ctx context.Context, closed <-chan struct{}, file *os.File, lock int) error {
	for wait := 100 * time.Microsecond; ; wait = min(2*wait, filePeriod) {
		err := unix.Flock(int(file.Fd()), lock|unix.LOCK_NB)
		if err == nil || err != unix.EWOULDBLOCK && err != unix.EINTR {
			return err
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
			continue
		case <-ctx.Done():
			err = fmt.Errorf("waiting for the lock of the file, which another process holds: %w", ctx.Err())
		case <-closed:
			err = ErrClosed
		}
		timer.Stop()
		return err
	}
}

func ended(closed <-chan struct{}) bool {
	select {
	case <-closed:
		return true
	default:
		return false
	}
}

// forget drops the values of a file that no longer exists.
func (s *FileStore) forget() {
	clear(s.values)
	s.read, s.file = 0, nil
}

// readOn reads the records from offset s.read up to size, the size of the file. It stops before an incomplete
// record.
func (s *FileStore) readOn(file *os.File, size int64) error {
	if size == s.read {
		return nil
	}
	tail := make([]byte, size-s.read)
	if n, err := file.ReadAt(tail, s.read); err != nil && !(err == io.EOF && int64(n) == size-s.read) {
		return err
	}
	for len(tail) > 0 {
		key, value, n := cutRecord(tail)
		if n == 0 && s.read > 0 {
			return nil
		}
		if n == 0 || !isKey(key) {
			return fmt.Errorf("the file is not a store: malformed record at byte %d", s.read)
		}
		if deleted, ok := strings.CutPrefix(key, deletedPrefix); ok {
			delete(s.values, deleted)
		} else {
			s.values[key] = clone(value)
		}
		tail = tail[n:]
		s.read += int64(n)
	}
	return nil
}

// isKey reports whether key may occur in a record. This check keeps the store from modifying a file of
// another kind that a user has named by mistake.
func isKey(key string) bool {
	return strings.HasPrefix(strings.TrimPrefix(key, deletedPrefix), userPrefix) || key == openKey ||
		key == closedKey
}

// write appends the encoded records in log to the file. The file must be locked and read to the end. If
// another process has left an incomplete record at the end of the file, write overwrites it.
func (s *FileStore) write(file *os.File, log []byte) error {
	if err := file.Truncate(s.read); err != nil {
		return err
	}
	if _, err := file.WriteAt(log, s.read); err != nil {
		return err
	}
	return s.readOn(file, s.read+int64(len(log)))
}

func appendRecord(log []byte, key string, value []byte) []byte {
	log = binary.LittleEndian.AppendUint32(log, uint32(len(key)))
	log = append(log, key...)
	log = binary.LittleEndian.AppendUint32(log, uint32(len(value)))
	return append(log, value...)
}

// cutRecord decodes the record at the start of b. n is the length of the record, or 0 if the record is
// incomplete.
func cutRecord(b []byte) (key string, value []byte, n int) {
	field := func() ([]byte, bool) {
		if len(b)-n < 4 {
			return nil, false
		}
		size := binary.LittleEndian.Uint32(b[n:])
		if uint64(size) > uint64(len(b)-n-4) {
			return nil, false
		}
		n += 4
		f := b[n : n+int(size)]
		n += int(size)
		return f, true
	}
	k, ok := field()
	if !ok {
		return "", nil, 0
	}
	if value, ok = field(); !ok {
		return "", nil, 0
	}
	return string(k), value, n
}
