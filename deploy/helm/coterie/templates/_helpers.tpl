{{- /* Reference of an image: (dict "root" $ "name" "cos"). */ -}}
{{- define "coterie.image" -}}
{{- $images := .root.Values.images -}}
{{- $where := ternary "" (printf "%s/" $images.registry) (empty $images.registry) -}}
{{- with index $images.digests .name -}}
{{ $where }}coterie-{{ $.name }}@{{ . }}
{{- else -}}
{{ $where }}coterie-{{ .name }}:{{ default .root.Chart.AppVersion $images.tag }}
{{- end -}}
{{- end -}}

{{- /* Labels of an object; those of its pods are app.kubernetes.io/name and part-of. */ -}}
{{- define "coterie.labels" -}}
app.kubernetes.io/part-of: coterie
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- /* Names of the parties' volumes, in order. */ -}}
{{- define "coterie.volumes" -}}
{{- $names := list "thirdparty-0" -}}
{{- if .Values.intakes -}}
{{- range $n := until (int .Values.coordinators) }}{{ $names = append $names (printf "coordinator-%d" $n) }}{{ end -}}
{{- range $n := until (int .Values.intakes) }}{{ $names = append $names (printf "intake-%d" $n) }}{{ end -}}
{{- else }}{{ $names = append $names "cos-0" }}{{ end -}}
{{- range $n := until (int .Values.owners) }}{{ $names = append $names (printf "owner-%d" $n) }}{{ end -}}
{{- range $n := until (int .Values.hosts) }}{{ $names = append $names (printf "host-%d" $n) }}{{ end -}}
{{- $names = append $names "operator" -}}
{{- toJson $names -}}
{{- end -}}

{{- /* Folder of a volume below the root of `bootstrap`. */ -}}
{{- define "coterie.folder" -}}
{{- if has . (list "thirdparty-0" "cos-0") }}{{ trimSuffix "-0" . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{- define "coterie.rights" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "coterie.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsUser: 10001
  runAsGroup: 10001
  runAsNonRoot: true
  fsGroup: 10001
  # Once: later it would open private files to the group.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- /* Waits until `bootstrap` has written a file: (dict "root" $ "image" "cos" "file" "config.toml"). */ -}}
{{- define "coterie.wait" -}}
- name: wait
  image: {{ include "coterie.image" (dict "root" .root "name" .image) }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  command: [sh, -c, "until [ -e /party/{{ .file }} ]; do sleep 1; done"]
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {cpu: 100m, memory: 64Mi}
  securityContext:
    {{- include "coterie.rights" . | nindent 4 }}
  volumeMounts:
    - {name: party, mountPath: /party}
{{- end -}}

{{- define "coterie.storage" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.storage.className }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .Values.storage.size }}}}
{{- end -}}

{{- /*
StatefulSet and headless service of a kind of party:
(dict "root" $ "name" "host" "image" "client" "replicas" 4), and perhaps "enrols", "database", "standby", "apart" or "spread".
*/ -}}
{{- define "coterie.party" -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ .name }}
  labels:
    {{- include "coterie.labels" .root | nindent 4 }}
spec:
  serviceName: {{ .name }}
  replicas: {{ .replicas }}
  podManagementPolicy: Parallel
  selector:
    matchLabels: {app.kubernetes.io/name: {{ .name }}}
  template:
    metadata:
      labels:
        app.kubernetes.io/name: {{ .name }}
        app.kubernetes.io/part-of: coterie
    spec:
      {{- include "coterie.pod" . | nindent 6 }}
      # A service takes 10 s at most to finish or hand back what is in flight.
      terminationGracePeriodSeconds: 20
      {{- if .apart }}
      # Two on one node would end with it: the second one waits for a node of its own.
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            - topologyKey: kubernetes.io/hostname
              labelSelector: {matchLabels: {app.kubernetes.io/name: {{ .name }}}}
      {{- end }}
      {{- if or .apart .spread }}
      topologySpreadConstraints:
        {{- range (ternary (list "topology.kubernetes.io/zone") (list "kubernetes.io/hostname" "topology.kubernetes.io/zone") (not (not .apart))) }}
        - maxSkew: 1
          topologyKey: {{ . }}
          whenUnsatisfiable: ScheduleAnyway
          labelSelector: {matchLabels: {app.kubernetes.io/name: {{ $.name }}}}
        {{- end }}
      {{- end }}
      initContainers:
        {{- include "coterie.wait" (dict "root" .root "image" .image "file" "config.toml") | nindent 8 }}
      containers:
        - name: {{ .name }}
          image: {{ include "coterie.image" (dict "root" .root "name" .image) }}
          imagePullPolicy: {{ .root.Values.images.pullPolicy }}
          env:
            - {name: COTERIE_METRICS, value: "0.0.0.0:9464"}
            {{- if .database }}
            - {name: COTERIE_DATABASE__URL, valueFrom: {secretKeyRef: {name: {{ .root.Values.database.secret }}, key: url}}}
            - {name: COTERIE_DATABASE__CA_FILE, value: /run/database/ca.pem}
            - {name: PGPASSWORD, valueFrom: {secretKeyRef: {name: {{ .root.Values.database.secret }}, key: password}}}
            {{- end }}
          ports:
            - {name: grpc, containerPort: 7443}
            {{- if .enrols }}
            - {name: enrol, containerPort: 7444}
            {{- end }}
            - {name: metrics, containerPort: 9464}
          # Up to the first certificate nothing answers.
          startupProbe:
            exec: {command: [python3, -I, -S, /opt/coterie/probe.py, --alive, /party/state]}
            periodSeconds: 2
            timeoutSeconds: 5
            failureThreshold: 60
          # The event loop answers: who waits for its peers is alive, and starting it again would help nobody.
          livenessProbe:
            exec: {command: [python3, -I, -S, /opt/coterie/probe.py, --alive, /party/state]}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          {{- if .standby }}
          # A standby that waits is ready to take over, although it is NOT_SERVING by gRPC health.
          readinessProbe:
            exec: {command: [python3, -I, -S, /opt/coterie/probe.py, --alive, /party/state]}
            periodSeconds: 5
            timeoutSeconds: 5
          {{- else }}
          readinessProbe:
            exec: {command: [python3, -I, -S, /opt/coterie/probe.py, /party/state]}
            periodSeconds: {{ ternary 2 5 (not (not .spread)) }}
            timeoutSeconds: 5
            {{- if .spread }}
            failureThreshold: 2
            {{- end }}
          {{- end }}
          resources:
            requests: {cpu: 100m, memory: 128Mi}
            limits: {cpu: "1", memory: {{ index .root.Values.memory .name }}}
          securityContext:
            {{- include "coterie.rights" . | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            - {name: party, mountPath: /party}
            {{- if .database }}
            - {name: database, mountPath: /run/database, readOnly: true}
            {{- end }}
      volumes:
        - {name: tmp, emptyDir: {medium: Memory, sizeLimit: 64Mi}}
        {{- if .database }}
        # The authority of the database's certificate alone: no password is in a file.
        - {name: database, secret: {secretName: {{ .root.Values.database.secret }}, items: [{key: ca.pem, path: ca.pem}]}}
        {{- end }}
  volumeClaimTemplates:
    - metadata: {name: party, labels: {app.kubernetes.io/part-of: coterie}}
      spec:
        {{- include "coterie.storage" .root | nindent 8 }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}
  labels:
    {{- include "coterie.labels" .root | nindent 4 }}
spec:
  clusterIP: None
  # A service that waits is not ready, and others must find it.
  publishNotReadyAddresses: true
  selector: {app.kubernetes.io/name: {{ .name }}}
  ports:
    - {name: grpc, port: 7443}
    {{- if .enrols }}
    - {name: enrol, port: 7444}
    {{- end }}
    - {name: metrics, port: 9464}
{{- end -}}
