// Package nsqd stands in for nsqd's own package while nsqd's tests run: every NSQD is an SRTM broker in a process of
// its own, and what the tests ask of a topic or a channel is asked over TCP and HTTP.
//
// options.go, logger.go and message.go of the real package are beside this file when the tests are built; nothing else
// of it is.
package nsqd

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"github.com/nsqio/nsq/internal/test"
)

const (
	TLSNotRequired = iota
	TLSRequiredExceptHTTP
	TLSRequired

	frameTypeResponse int32 = 0
	frameTypeError    int32 = 1
	frameTypeMessage  int32 = 2
)

var listening = regexp.MustCompile(`(TCP|HTTP|HTTPS) 127\.0\.0\.1:(\d+)`)

// NSQD is a broker that runs.
type NSQD struct {
	opts          *Options
	process       *exec.Cmd
	ports         map[string]int
	client        *http.Client
	httpsListener address
	publishing    sync.Mutex
	publisher     net.Conn
}

// New starts a broker with the same options, as far as a test can see them.
func New(opts *Options) (*NSQD, error) {
	n := &NSQD{opts: opts, ports: make(map[string]int)}
	n.process = exec.Command(os.Getenv("SRTM_PYTHON"), append([]string{"-m", "srtm", "broker"}, flags(opts)...)...)
	n.process.Stderr = os.Stderr
	out, err := n.process.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := n.process.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		n.process.Wait()
		return nil, fmt.Errorf("the broker did not start: %w", err)
	}
	for _, found := range listening.FindAllStringSubmatch(line, -1) {
		n.ports[found[1]], _ = strconv.Atoi(found[2])
	}
	n.httpsListener = address{&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: n.ports["HTTPS"]}}
	n.client = &http.Client{Transport: transport(opts), Timeout: 10 * time.Second}
	return n, nil
}

func flags(opts *Options) []string {
	hostname, _ := os.Hostname()
	all := []string{
		"--tcp-port", "0", "--http-port", "0", "--name", hostname, "--broadcast-address", opts.BroadcastAddress,
		"--log-level", "warning",
		"--max-msg-size", strconv.FormatInt(opts.MaxMsgSize, 10),
		"--max-body-size", strconv.FormatInt(opts.MaxBodySize, 10),
		"--max-rdy-count", strconv.FormatInt(opts.MaxRdyCount, 10),
		"--max-output-buffer-size", strconv.FormatInt(opts.MaxOutputBufferSize, 10),
		"--max-channel-consumers", strconv.Itoa(opts.MaxChannelConsumers),
		"--max-deflate-level", strconv.Itoa(opts.MaxDeflateLevel),
	}
	for flag, value := range map[string]time.Duration{
		"--msg-timeout":               opts.MsgTimeout,
		"--max-msg-timeout":           opts.MaxMsgTimeout,
		"--max-req-timeout":           opts.MaxReqTimeout,
		"--client-timeout":            opts.ClientTimeout,
		"--max-heartbeat-interval":    opts.MaxHeartbeatInterval,
		"--output-buffer-timeout":     opts.OutputBufferTimeout,
		"--min-output-buffer-timeout": opts.MinOutputBufferTimeout,
		"--max-output-buffer-timeout": opts.MaxOutputBufferTimeout,
	} {
		all = append(all, flag, fmt.Sprintf("%dms", value/time.Millisecond))
	}
	for flag, path := range map[string]string{"--tcp-socket": opts.TCPAddress, "--http-socket": opts.HTTPAddress} {
		if strings.HasPrefix(path, "/") {
			all = append(all, flag, path)
		}
	}
	for _, address := range opts.NSQLookupdTCPAddresses {
		all = append(all, "--lookupd-tcp-address", address)
	}
	for _, address := range opts.AuthHTTPAddresses {
		all = append(all, "--auth-http-address", address)
	}
	if opts.TLSCert == "" {
		return all
	}
	all = append(all, "--tls-cert", opts.TLSCert, "--tls-key", opts.TLSKey, "--https-port", "0")
	if opts.TLSClientAuthPolicy != "" {
		authority := opts.TLSRootCAFile
		if authority == "" {
			// nsqd takes any certificate then. SRTM verifies all, so it is told who made the one that the tests show.
			authority = "./test/certs/stranger.pem"
		}
		all = append(all, "--tls-client-auth-policy", opts.TLSClientAuthPolicy, "--tls-root-ca-file", authority)
	}
	if opts.TLSRequired != TLSNotRequired {
		all = append(all, "--tls-required")
	}
	if opts.TLSRequired == TLSRequiredExceptHTTP {
		all = append(all, "--plain-http")
	}
	return all
}

// transport makes the tests' own questions get through, whatever certificates the broker wants.
func transport(opts *Options) *http.Transport {
	config := &tls.Config{InsecureSkipVerify: true}
	pair := []string{"./test/certs/client.pem", "./test/certs/client.key"}
	if opts.TLSRootCAFile == "" {
		pair = []string{"./test/certs/cert.pem", "./test/certs/key.pem"}
	}
	if cert, err := tls.LoadX509KeyPair(pair[0], pair[1]); err == nil {
		config.Certificates = []tls.Certificate{cert}
	}
	return &http.Transport{TLSClientConfig: config}
}

// Main returns at once: the broker serves already.
func (n *NSQD) Main() error { return nil }

// Exit stops the broker, and waits until it has ended.
func (n *NSQD) Exit() {
	if n.publisher != nil {
		n.publisher.Close()
	}
	n.process.Process.Signal(syscall.SIGTERM)
	n.process.Wait()
}

func (n *NSQD) RealTCPAddr() net.Addr  { return n.real(n.opts.TCPAddress, "TCP") }
func (n *NSQD) RealHTTPAddr() net.Addr { return n.real(n.opts.HTTPAddress, "HTTP") }

func (n *NSQD) real(given string, kind string) net.Addr {
	if strings.HasPrefix(given, "/") {
		return &net.UnixAddr{Name: given, Net: "unix"}
	}
	return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: n.ports[kind]}
}

type address struct{ addr net.Addr }

func (a address) Addr() net.Addr { return a.addr }

// ask sends a request, over HTTPS if the broker answers nothing else.
func (n *NSQD) ask(method string, path string, body string) ([]byte, error) {
	at := fmt.Sprintf("http://127.0.0.1:%d", n.ports["HTTP"])
	required := n.opts.TLSRequired != TLSNotRequired || n.opts.TLSClientAuthPolicy != ""
	if required && n.opts.TLSRequired != TLSRequiredExceptHTTP {
		at = fmt.Sprintf("https://127.0.0.1:%d", n.ports["HTTPS"])
	}
	request, err := http.NewRequest(method, at+path, bytes.NewBufferString(body))
	if err != nil {
		return nil, err
	}
	response, err := n.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	found, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != 200 {
		err = fmt.Errorf("%s %s: %s %s", method, path, response.Status, found)
	}
	return found, err
}

func (n *NSQD) must(method string, path string) []byte {
	found, err := n.ask(method, path, "")
	if err != nil {
		panic(err)
	}
	return found
}

// Stats is what /stats says.
type Stats struct {
	Topics []struct {
		TopicName    string `json:"topic_name"`
		Depth        int64  `json:"depth"`
		MessageCount uint64 `json:"message_count"`
		Paused       bool   `json:"paused"`
		Channels     []struct {
			ChannelName   string            `json:"channel_name"`
			Depth         int64             `json:"depth"`
			InFlightCount int               `json:"in_flight_count"`
			DeferredCount int               `json:"deferred_count"`
			MessageCount  uint64            `json:"message_count"`
			RequeueCount  uint64            `json:"requeue_count"`
			TimeoutCount  uint64            `json:"timeout_count"`
			ClientCount   int               `json:"client_count"`
			Clients       []json.RawMessage `json:"clients"`
			Paused        bool              `json:"paused"`
		} `json:"channels"`
	} `json:"topics"`
}

func (n *NSQD) GetStats(topic string, channel string, includeClients bool) Stats {
	query := url.Values{"format": {"json"}, "topic": {topic}, "channel": {channel}}
	query.Set("include_clients", strconv.FormatBool(includeClients))
	var stats Stats
	if err := json.Unmarshal(n.must("GET", "/stats?"+query.Encode()), &stats); err != nil {
		panic(err)
	}
	return stats
}

// started is the time that the broker says it has begun.
func (n *NSQD) started() time.Time {
	var info struct {
		StartTime int64 `json:"start_time"`
	}
	if err := json.Unmarshal(n.must("GET", "/info"), &info); err != nil {
		panic(err)
	}
	return time.Unix(info.StartTime, 0)
}

// getOpts are the options, with the one that a test changes over HTTP as the broker has it now.
func (n *NSQD) getOpts() *Options {
	now := *n.opts
	if err := json.Unmarshal(n.must("GET", "/config/log_level"), &now.LogLevel); err != nil {
		panic(err)
	}
	return &now
}

func (n *NSQD) topics() int { return len(n.GetStats("", "", false).Topics) }

// Topic is a topic at a broker, by its name.
type Topic struct {
	name string
	nsqd *NSQD
}

func (n *NSQD) GetTopic(name string) *Topic {
	n.must("POST", "/topic/create?topic="+url.QueryEscape(name))
	return &Topic{name, n}
}

func (n *NSQD) GetExistingTopic(name string) (*Topic, error) {
	if len(n.GetStats(name, "", false).Topics) == 0 {
		return nil, errors.New("topic does not exist")
	}
	return &Topic{name, n}, nil
}

func (n *NSQD) DeleteExistingTopic(name string) error {
	_, err := n.ask("POST", "/topic/delete?topic="+url.QueryEscape(name), "")
	return err
}

// GenerateID returns none: the broker gives a message its id.
func (t *Topic) GenerateID() MessageID { return MessageID{} }

// PutMessage publishes over TCP, on a connection that all topics of the broker share.
func (t *Topic) PutMessage(m *Message) error {
	n := t.nsqd
	n.publishing.Lock()
	defer n.publishing.Unlock()
	if n.publisher == nil {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", n.ports["TCP"]))
		if err != nil {
			return err
		}
		conn.Write(nsq.MagicV2)
		n.publisher = conn
	}
	if _, err := nsq.Publish(t.name, m.Body).WriteTo(n.publisher); err != nil {
		return err
	}
	for {
		response, err := nsq.ReadResponse(n.publisher)
		if err != nil {
			return err
		}
		frameType, data, err := nsq.UnpackResponse(response)
		if err != nil || frameType != frameTypeResponse {
			return fmt.Errorf("PUB: %v %q", err, data)
		}
		if string(data) == "OK" {
			return nil
		}
		nsq.Nop().WriteTo(n.publisher)
	}
}

func (t *Topic) stats() (depth int64, paused bool, channels int) {
	for _, found := range t.nsqd.GetStats(t.name, "", false).Topics {
		return found.Depth, found.Paused, len(found.Channels)
	}
	return 0, false, 0
}

func (t *Topic) Depth() int64   { depth, _, _ := t.stats(); return depth }
func (t *Topic) IsPaused() bool { _, paused, _ := t.stats(); return paused }
func (t *Topic) channels() int  { _, _, channels := t.stats(); return channels }
func (t *Topic) Pause() error   { return t.post("/topic/pause", "") }
func (t *Topic) UnPause() error { return t.post("/topic/unpause", "") }

func (t *Topic) post(path string, channel string) error {
	query := url.Values{"topic": {t.name}}
	if channel != "" {
		query.Set("channel", channel)
	}
	_, err := t.nsqd.ask("POST", path+"?"+query.Encode(), "")
	return err
}

// Channel is a channel of a topic, by its name.
type Channel struct {
	name  string
	topic *Topic
}

func (t *Topic) GetChannel(name string) *Channel {
	if err := t.post("/channel/create", name); err != nil {
		panic(err)
	}
	return &Channel{name, t}
}

func (t *Topic) GetExistingChannel(name string) (*Channel, error) {
	if len(t.nsqd.GetStats(t.name, name, false).Topics) == 0 {
		return nil, errors.New("channel does not exist")
	}
	return &Channel{name, t}, nil
}

func (t *Topic) DeleteExistingChannel(name string) error { return t.post("/channel/delete", name) }

func (c *Channel) Pause() error   { return c.topic.post("/channel/pause", c.name) }
func (c *Channel) UnPause() error { return c.topic.post("/channel/unpause", c.name) }

type counts struct {
	depth, inFlight, deferred, messages, requeued, timedOut int
	paused                                                  bool
}

func (c *Channel) counts() counts {
	for _, topic := range c.topic.nsqd.GetStats(c.topic.name, c.name, false).Topics {
		for _, found := range topic.Channels {
			return counts{
				int(found.Depth), found.InFlightCount, found.DeferredCount, int(found.MessageCount),
				int(found.RequeueCount), int(found.TimeoutCount), found.Paused,
			}
		}
	}
	return counts{}
}

func (c *Channel) Depth() int64   { return int64(c.counts().depth) }
func (c *Channel) IsPaused() bool { return c.counts().paused }

// takeWaiting removes the only message that waits in the channel, which must be the one that was published last.
func (c *Channel) takeWaiting(t *testing.T, published *Message) *Message {
	test.Equal(t, 1, c.counts().depth)
	test.Nil(t, c.topic.post("/channel/empty", c.name))
	return published
}

// sameMessage compares two ids, or learns the id that the broker has given to a message that a test has made.
func sameMessage(t *testing.T, made *Message, received *Message) {
	if made.ID == (MessageID{}) {
		made.ID = received.ID
	}
	test.Equal(t, made.ID, received.ID)
}
