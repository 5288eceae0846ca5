{{/*
Deployment of a component. Takes a dict of root, component, settings (its values), args and drain; and may take files,
each with a path and a volume, and follows: a text with which the pods are replaced when it changes.
*/}}
{{- define "tiphys.deployment" -}}
{{- $root := .root -}}
{{- $selector := dict "root" $root "component" .component -}}
{{- $files := .files | default list -}}
{{- with include "tiphys.tlsSecret" $root -}}
{{- $items := list (dict "key" "tls.crt" "path" "tls.crt") (dict "key" "tls.key" "path" "tls.key") -}}
{{- $certificate := dict "name" "certificate" "secret" (dict "secretName" . "items" $items) -}}
{{- $files = append $files (dict "path" "/etc/tiphys/tls" "volume" $certificate) -}}
{{- end -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $root.Release.Name }}-{{ .component }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "tiphys.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  replicas: {{ .settings.replicas }}
  revisionHistoryLimit: 3
  selector:
    matchLabels:
      {{- include "tiphys.selector" $selector | nindent 6 }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      maxUnavailable: 0
      maxSurge: 1
  template:
    metadata:
      labels:
        {{- $own := include "tiphys.selector" $selector | fromYaml | merge (dict "tiphys.dev/pods" $root.Release.Name) }}
        {{- merge $own .settings.podLabels $root.Values.commonLabels | toYaml | nindent 8 }}
      {{- if or .settings.podAnnotations .follows }}
      annotations:
        {{- with .settings.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with .follows }}
        tiphys.dev/follows: {{ sha256sum . }}
        {{- end }}
      {{- end }}
    spec:
      serviceAccountName: {{ $root.Release.Name }}-{{ .component }}
      automountServiceAccountToken: true
      enableServiceLinks: false
      terminationGracePeriodSeconds: 40
      {{- include "tiphys.podSecurity" $root | nindent 6 }}
      {{- include "tiphys.scheduling" . | nindent 6 }}
      containers:
        - name: {{ .component }}
          image: {{ include "tiphys.image" $root | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [python, -m]
          args:
            {{- toYaml .args | nindent 12 }}
          ports:
            - name: http
              containerPort: 7243
          env:
            - name: POD_NAME
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
            {{- with .settings.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          envFrom:
            - secretRef:
                name: {{ $root.Values.store.controlSecret }}
                optional: true
          {{- include "tiphys.probes" . | nindent 10 }}
          resources:
            {{- toYaml .settings.resources | nindent 12 }}
          {{- include "tiphys.containerSecurity" $root | nindent 10 }}
          volumeMounts:
            - name: scratch
              mountPath: /tmp
            {{- range $files }}
            - name: {{ .volume.name }}
              mountPath: {{ .path }}
              readOnly: true
            {{- end }}
      volumes:
        - name: scratch
          emptyDir:
            sizeLimit: 1Gi
        {{- range $files }}
        - {{- toYaml .volume | nindent 10 }}
        {{- end }}
{{- end }}

{{- define "tiphys.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "tiphys.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* A pod that is being deleted still gets calls until its removal from the endpoints has reached every node. */}}
{{- define "tiphys.probes" -}}
{{- $scheme := ternary "HTTPS" "" (eq "https" (include "tiphys.scheme" .root)) }}
{{- if .drain }}
lifecycle:
  preStop:
    sleep:
      seconds: 5
{{- end }}
livenessProbe:
  httpGet:
    path: /healthz
    port: http
    {{- with $scheme }}
    scheme: {{ . }}
    {{- end }}
  initialDelaySeconds: 10
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet:
    path: /readyz
    port: http
    {{- with $scheme }}
    scheme: {{ . }}
    {{- end }}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 3
{{- end }}

{{- define "tiphys.scheduling" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := .settings.tolerations | default list }}
{{- /* Kubernetes gives up a pod of a lost node after five minutes, in which its workflows would wait. */}}
{{- range $key := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" }}
{{- $named := false }}
{{- range $tolerations }}
{{- $named = or $named (eq (.key | default $key) $key) }}
{{- end }}
{{- if not $named }}
{{- $tolerations = append $tolerations (dict "key" $key "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" 30) }}
{{- end }}
{{- end }}
tolerations:
  {{- toYaml $tolerations | nindent 2 }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if .settings.affinity }}
affinity:
  {{- toYaml .settings.affinity | nindent 2 }}
{{- else }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tiphys.selector" (dict "root" .root "component" .component) | nindent 8 }}
{{- end }}
{{- end }}
